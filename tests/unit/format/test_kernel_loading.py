"""Numba loads kernels: Ctrl-C does not stop it half-way, and it loads no outdated kernel."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numba
import pytest
from numba.core import caching
from numba.core.dispatcher import Dispatcher

import logquarry.format.kernels.bytes as bytes_module
from logquarry.format.kernels.bytes import kernel


def test_an_interrupt_waits_until_the_kernel_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    def load(dispatcher: Any, signature: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        found = real(dispatcher, signature)
        loaded.append(found)
        return found

    real = Dispatcher.compile
    monkeypatch.setattr(Dispatcher, "compile", load)

    @kernel
    def doubled(number: int) -> int:
        return 2 * number

    with pytest.raises(KeyboardInterrupt):
        doubled(1)
    assert len(loaded) == 1
    assert doubled(4) == 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Numba's folder for the cache."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    return tmp_path


def tripled() -> Any:
    """A new kernel, which has the same cached code each time."""

    @kernel
    def triple(number: int) -> int:
        return 3 * number

    return triple


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"no pickle", None])
def test_a_file_of_the_cache_that_cannot_be_used_is_replaced(
    folder: Path, suffix: str, content: bytes | None
) -> None:
    assert tripled()(2) == 6
    (path,) = folder.rglob(f"*triple*.{suffix}")
    start = path.read_bytes()[:2]
    path.unlink()
    # None: another user's file cannot be read; here, a link to itself stands for it.
    path.symlink_to(path.name) if content is None else path.write_bytes(content)
    assert tripled()(2) == 6
    assert path.read_bytes()[:2] == start
    again = tripled()
    assert again(2) == 6 and again.stats.cache_hits


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "no descriptor")])
def test_a_sound_cache_stays_if_a_limit_is_reached(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert tripled()(2) == 6
    before = {path: path.stat() for path in folder.rglob("*triple*")}
    with monkeypatch.context() as patched:
        patched.setattr(caching.IndexDataCacheFile, "_load_index", Mock(side_effect=error))
        once = tripled()
        assert once(2) == 6
    assert once(2.5) == 7.5
    assert {path: path.stat() for path in folder.rglob("*triple*")} == before
    again = tripled()
    assert again(2) == 6 and again.stats.cache_hits


def test_a_kernel_needs_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr(caching.IndexDataCacheFile, "_open_for_write", Mock(side_effect=full))
        assert tripled()(2) == 6
    (folder / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder / "file"))
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=full))
    assert tripled()(2) == 6


def test_numba_compiles_a_kernel_again_if_a_file_that_it_uses_has_changed(tmp_path: Path) -> None:
    """An upgrade may change a function or a constant that is inlined into a kernel of another file.

    Numba itself compares only the kernel's own file with its cache.
    """
    package = Path(bytes_module.__file__).parents[2]
    copied = tmp_path / "logquarry"
    shutil.copytree(package, copied, ignore=shutil.ignore_patterns("__pycache__"))
    kernels, source = copied / "format" / "kernels", copied / "format" / "java.py"

    def answer() -> str:
        return subprocess.run(
            [sys.executable, "-c", "import probe; print(probe.masked())"],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{kernels}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    (kernels / "probe.py").write_text(
        "from logquarry.format.kernels.bytes import CRC_MASK, kernel\n"
        "@kernel\n"
        "def masked():\n"
        "    return CRC_MASK\n"
    )
    assert answer() == str(0x7FFFFFFF)
    assert list((kernels / "__pycache__").glob("probe.masked*.nbi"))
    source.write_text(source.read_text().replace("INT_MAX = 0x7FFFFFFF", "INT_MAX = 0x7FFF"))
    assert answer() == str(0x7FFF)
