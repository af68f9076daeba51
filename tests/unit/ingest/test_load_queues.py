"""A load whose messages cannot be put into their queues fails."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.errors import StoreError, StoreUnavailable
from logquarry.ingest.load import commit_load, plan_load
from logquarry.ingest.staging import LoadPlan, Staged, Stager
from logquarry.store.load.ledger import LoadId
from logquarry.write.dispatcher import Dispatcher
from tests.helpers.small_store import config

LOAD = LoadId("job", 1)


def staged(plan: LoadPlan) -> list[Staged]:
    stager = Stager(plan, LOAD, 0)
    stager.add(pa.record_batch({"topic": ["t", "u"], "body": pa.array([b"1", b"2"], pa.binary())}))
    return [stager.finish()]


@pytest.mark.parametrize("brokers", [1, 2])
def test_a_file_in_place_of_the_folder_of_a_topic(tmp_path: Path, brokers: int) -> None:
    plan = plan_load(LoadPlan(path=str(tmp_path / "stores"), brokers=brokers, config=config()))
    for broker in range(brokers):
        folder = plan.store(broker) / "consumequeue"
        folder.mkdir(parents=True)
        (folder / "u").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"consumequeue/u.* is not a folder"):
            commit_load(plan, LOAD, staged(plan))
    for broker in range(brokers):
        assert not (plan.store(broker) / ".logquarry/loads/intent.json").exists()
        (plan.store(broker) / "consumequeue/u").unlink()
    commit_load(plan, LOAD, staged(plan))
    found = []
    for broker in range(brokers):
        if (plan.store(broker) / "commitlog").exists():
            with lq.MessageStore.open(plan.store(broker), config=config()) as store:
                found += [message.topic for message in store.scan()]
    assert sorted(found) == ["t", "u"]


def test_an_error_of_the_dispatcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_load(LoadPlan(path=str(tmp_path / "store"), config=config()))

    def fails(self: Dispatcher) -> None:
        raise StoreUnavailable("the queue cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "dispatch_until", fails)
        with pytest.raises(StoreError, match="the queue cannot be written"):
            commit_load(plan, LOAD, staged(plan))
    # The log has the load, and the next opening puts it into the queues.
    assert commit_load(plan, LOAD, staged(plan)).was_there
    with lq.MessageStore.open(tmp_path / "store", config=config()) as store:
        found = [store.get("u", queue_id, 0, 10).messages for queue_id in range(4)]
        assert [message.body for messages in found for message in messages] == [b"2"]
