"""Dialect 3.1: a transaction stays open if its end was interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.message import Message
from logquarry.store.message_store import StoreWriter


def test_a_transaction_can_be_ended_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: Message) -> Any:
        raise KeyboardInterrupt

    with StoreWriter.start(tmp_path / "s", config=StoreConfig(dialect="3.1")) as store:
        service = store.prepared_transactions
        begun = service.begin(Message("t", b"x"), group="g")
        with monkeypatch.context() as failing:
            failing.setattr(service, "_put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                service.commit(begun.physical_offset)
        assert service.commit(begun.physical_offset).ok
