"""Where caches go."""

from __future__ import annotations

from pathlib import Path

import pytest

from logquarry.cache import cache_folder, cache_folders


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
