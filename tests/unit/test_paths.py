"""A path that the disk cannot read is not missing, whatever the version of Python does."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

import logquarry
from logquarry.paths import exists, is_file, is_folder, is_link

SOURCE = Path(logquarry.__file__).parent
NOT_CHECKED = ("bench", "cli", "spark", "testing")
"""Packages in which a wrong answer only changes a message."""
LOOKUPS = ("exists", "is_file", "is_dir", "is_symlink")
ENTRIES = {"entry", "name"}
"""Names of os.DirEntry objects, whose methods raise the error."""
ALLOWED = {
    # The error of another call is reported.
    ("disk/disk.py", "place.is_file()"),
    # Only the text of an error depends on it.
    ("disk/disk.py", "folder.is_symlink()"),
    # Links in a circle count as files.
    ("systems.py", "Path(entry).is_dir()"),
    ("compiled.py", "source.exists()"),
}


def test_lookups(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "link").symlink_to("file")
    for name, found in {
        ".": (True, False, True),
        "file": (True, True, False),
        "link": (True, True, False),
        "none": (False, False, False),
        "file/below": (False, False, False),
        "circle": (False, False, False),
        "\0": (False, False, False),
    }.items():
        path = tmp_path / name
        assert (exists(path), is_file(path), is_folder(path)) == found
        assert is_link(path) == (name in ("link", "circle"))


@pytest.mark.parametrize("call", [exists, is_file, is_folder, is_link])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_an_unreadable_path_raises(
    monkeypatch: pytest.MonkeyPatch, code: int, call: object
) -> None:
    def stat(path: object, *, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        assert callable(call)
        with pytest.raises(OSError, match=os.strerror(code)):
            call("x")


def test_no_module_uses_the_lookups_of_path() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(NOT_CHECKED):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_lookup = node.func.attr in LOOKUPS and not node.args
            text = ast.unparse(node)
            if is_lookup and text.split(".")[0] not in ENTRIES and (name, text) not in ALLOWED:
                found.append(f"{name}:{node.lineno}: {text}")
    assert not found
