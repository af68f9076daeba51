"""Ctrl-C while numba loads a kernel: otherwise numba could load no other kernel afterwards."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

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
