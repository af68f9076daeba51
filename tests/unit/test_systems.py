"""Interrupts that are held back, and folders for caches.

Interrupts that wait. No Spark is needed.

Where caches go.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from logquarry import systems
from logquarry.systems import cache_folder, cache_folders, held


@pytest.fixture(autouse=True)
def python_s_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), held():
        interrupt()
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_where_it_is_looked_for() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), held() as interrupts:
        interrupts.check()
        interrupt()
        reached.append("before")
        interrupts.check()
        reached.append("behind")
    assert reached == ["before"]


def test_a_second_one_does_not_wait() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), held():
        interrupt()
        reached.append("one")
        interrupt()
        reached.append("two")
    assert reached == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM])
def test_a_second_hang_up_waits(first: signal.Signals) -> None:
    """A terminal that closes can send SIGHUP twice, and systemd can send it after SIGTERM."""
    came: list[int] = []
    numbers = (signal.SIGHUP, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, frame: came.append(number)) for n in numbers}
    try:
        with held():
            signal.raise_signal(first)
            signal.raise_signal(signal.SIGHUP)
            assert not came
        assert came == [first]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_handler_that_was_set_meanwhile_goes() -> None:
    with held():
        signal.signal(signal.SIGINT, lambda number, frame: None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_not_lost_with_another_exception() -> None:
    with pytest.raises(KeyboardInterrupt), held():
        interrupt()
        raise ValueError


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        # As PySpark does, whatever handler was set before.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_holds_nothing() -> None:
    def run() -> None:
        with held() as interrupts:
            interrupts.check()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


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


def test_a_user_without_a_home_gets_the_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container can run with a user id that is not in /etc/passwd."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder({}).parent == temporary


def test_a_temporary_folder_that_cannot_be_written(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, access = temporary / f"logquarry-{os.getuid()}", os.access
    # Root can write every folder, so the test does not change the mode.
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    folder = cache_folder({"LOGQUARRY_CACHE_DIR": "/dev/null/x"})
    assert folder.parent == temporary and folder != closed
    systems._remove(folder, os.getpid())
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "missing"))
    with pytest.raises(PermissionError, match="set LOGQUARRY_CACHE_DIR"):
        cache_folder({"LOGQUARRY_CACHE_DIR": "/dev/null/x"})


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
    return not str(path).endswith("kernels") and real(path, mode)
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


@pytest.mark.parametrize("is_held", [False, True])
def test_a_lock_on_macos(is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS orders the fields of struct flock differently, and has other numbers."""

    def answer(descriptor: int, command: int, request: bytes) -> bytes:
        assert command == macos.F_GETLK
        start, length, pid, kind, whence = struct.unpack_from("=qqihh", request)
        assert (start, length, kind, whence) == (0, 1, macos.F_WRLCK, os.SEEK_SET)
        kind = macos.F_WRLCK if is_held else macos.F_UNLCK
        return struct.pack("=qqihh", start, length, pid, kind, whence)

    macos = SimpleNamespace(F_GETLK=7, F_WRLCK=3, F_UNLCK=2, fcntl=answer)
    monkeypatch.setattr(systems, "fcntl", macos)
    monkeypatch.setattr(sys, "platform", "darwin")
    (tmp_path / "lock").touch()
    assert systems.is_locked(tmp_path / "lock") is is_held
