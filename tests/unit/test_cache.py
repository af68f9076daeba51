"""Where caches go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from logquarry import systems
from logquarry.systems import cache_folder, cache_folders


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LOGQUARRY_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/h"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/h"}, "/xdg/logquarry"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/logquarry"),
        ({"HOME": "/h"}, "/h/.cache/logquarry"),
    ],
)
def test_order(environ: dict[str, str], expected: str) -> None:
    assert next(cache_folders(environ)) == Path(expected)


def test_cache_folder_is_made(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    assert cache_folder({"LOGQUARRY_CACHE_DIR": str(wanted)}) == wanted
    assert wanted.is_dir()


def test_folders_that_are_not_needed_are_not_made(tmp_path: Path, temporary: Path) -> None:
    cache_folder({"LOGQUARRY_CACHE_DIR": str(tmp_path / "cache")})
    assert list(temporary.iterdir()) == []


def test_temporary_folder_where_the_cache_cannot_be(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    environ = {"LOGQUARRY_CACHE_DIR": str(tmp_path / "file" / "cache")}
    folder = cache_folder(environ)
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o077 == 0
    assert cache_folder(environ) == folder


@pytest.mark.parametrize("trap", ["link", "open to others"])
def test_temporary_folder_of_others_is_left_alone(
    tmp_path: Path, temporary: Path, trap: str
) -> None:
    *_, folder = cache_folders({"HOME": "/h"})
    folder.rmdir()
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    *_, other = cache_folders({"HOME": "/h"})
    assert other != folder
    assert other.parent == temporary
    *_, again = cache_folders({"HOME": "/h"})
    assert again == other
    systems._remove(other, os.getpid() + 1)
    assert other.is_dir()
    systems._remove(other, os.getpid())
    assert not other.exists()


def test_a_folder_of_one_process_goes_with_it(tmp_path: Path) -> None:
    (tmp_path / f"logquarry-{os.getuid()}").write_text("in the way")
    program = "from logquarry.systems import cache_folder; print(cache_folder())"
    environ = os.environ | {"TMPDIR": str(tmp_path), "LOGQUARRY_CACHE_DIR": "/dev/null/x"}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    folder = Path(told.stdout.strip())
    assert folder.parent == tmp_path
    assert not folder.exists()


def test_kernels_that_cannot_be_kept_beside_the_package(tmp_path: Path) -> None:
    program = """
import os
from unittest import mock
def access(path, mode, real=os.access):
    return not str(path).endswith("format") and real(path, mode)
with mock.patch("os.access", access):
    import logquarry.format.kernels.bytes
import numba
print(numba.config.CACHE_DIR)
"""
    environ = os.environ | {"LOGQUARRY_CACHE_DIR": str(tmp_path), "NUMBA_CACHE_DIR": ""}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(tmp_path / "kernels")
