"""A path that the disk cannot read is not missing, whatever the version of Python does."""

from __future__ import annotations

import ast
import errno
import glob
import os
from pathlib import Path

import pytest

import logquarry
from logquarry.paths import exists, is_file, is_folder, is_link, matching

SOURCE = Path(logquarry.__file__).parent
NOT_CHECKED = ("bench", "cli", "spark", "testing")
"""Packages in which a wrong answer only changes a message."""
LOOKUPS = ("exists", "is_file", "is_dir", "is_symlink")
LISTS = ("glob", "rglob")
"""Methods that skip an unreadable folder since Python 3.13."""
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
    # A kernel that the digest leaves out is only compiled too rarely after an upgrade.
    ("format/kernels/bytes.py", "folder.rglob('*.py')"),
    # The files that are not found keep their hard links.
    ("disk/name_guard.py", "folder.glob('*')"),
    ("disk/name_guard.py", "folder.glob('*/*')"),
    # RocksDB has just written this folder; the files are logs and a lock.
    ("repair/rebuild/other_queues.py", "self._folder.glob(pattern)"),
    ("systems.py", "_PROC.glob('[0-9]*')"),
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


@pytest.mark.parametrize(
    "pattern",
    [
        "*",
        "a*/*.json",
        "**/*.json",
        "a1/**",
        "**",
        "a[12]/x.json",
        "?1/.h*",
        "b/*",
        "a1/x.json",
        "-*",
    ],
)
@pytest.mark.parametrize("is_absolute", [True, False])
def test_matching_agrees_with_glob(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, is_absolute: bool
) -> None:
    for name in ("a1/x.json", "a1/y.txt", "a1/.hidden", "a2/x.json", "a2/deep/er/z.json", "file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link").symlink_to("a2")
    (tmp_path / "none").symlink_to("missing")
    monkeypatch.chdir(tmp_path)
    wanted = str(tmp_path / pattern) if is_absolute else pattern
    expected = {Path(name) for name in glob.glob(wanted, recursive=True)}  # noqa: PTH207
    # For "**", glob.glob leaves out the current folder.
    assert set(matching(wanted)) - {Path()} == expected


def test_matching_raises_if_a_folder_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    scandir, stat = os.scandir, os.stat

    def listed(path: Path) -> object:
        if path.name == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    def looked_up(path: Path, **settings: bool) -> os.stat_result:
        if path.parent.name == "broken":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **settings)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", listed)
        with pytest.raises(OSError, match="Input/output"):
            matching(f"{tmp_path}/*/*.json")
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", looked_up)
        with pytest.raises(OSError, match="Input/output"):
            matching(f"{tmp_path}/*/part.json")


def test_matching_follows_no_link_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.json").touch()
    (tmp_path / "a" / "b" / ("circle" * 20)).symlink_to("..")
    assert matching(f"{tmp_path}/**/*.json") == [tmp_path / "a" / "b" / "x.json"]


def test_no_module_uses_the_lookups_of_path() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith(NOT_CHECKED):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_lookup = (node.func.attr in LOOKUPS and not node.args) or node.func.attr in LISTS
            text = ast.unparse(node)
            if is_lookup and text.split(".")[0] not in ENTRIES and (name, text) not in ALLOWED:
                found.append(f"{name}:{node.lineno}: {text}")
    assert not found
