"""Commands whose store needs a recovery after its close: exit code and next step."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.cli import broker, replication
from logquarry.disk.disk import Disk
from tests.cli.test_replication import SIZES, serving
from tests.helpers.command import run
from tests.helpers.imports import Import, line, write
from tests.helpers.replication import fill
from tests.helpers.small_store import opened


@pytest.fixture
def keeps_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot delete ``abort``, which is the last step of a close."""
    unlink = Disk.unlink

    def failing(self: Disk, path: Path) -> None:
        if path.name == "abort":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(self, path)

    monkeypatch.setattr(Disk, "unlink", failing)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as soon as a command serves."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    async def interrupt_broker(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(replication, "show_status", interrupt)
    monkeypatch.setattr(broker, "_show", interrupt_broker)


def check(stderr: str, store: Path) -> None:
    lines = stderr.splitlines()
    assert f"error: {store}: not shut down cleanly: {store / 'abort'}: Input/output error" in stderr
    assert lines[-1].startswith(f"next: logquarry recover {store} --apply")
    assert (store / "abort").exists()


@pytest.mark.usefixtures("keeps_abort")
def test_an_import(tmp_path: Path, put_in: Import) -> None:
    source = write(tmp_path / "a.jsonl", line(), line())
    result = put_in(source, code=4)
    check(result.stderr, tmp_path / "store")
    assert f"all 2 messages of {source} are in {tmp_path / 'store'}\n" in result.stderr
    assert "put 2 messages" not in result.stderr


def test_the_next_step_works(
    tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    with monkeypatch.context():
        request.getfixturevalue("keeps_abort")
        put_in(write(tmp_path / "a.jsonl", line()), code=4)
    monkeypatch.undo()
    run("recover", tmp_path / "store", "--apply", "--config", tmp_path / "settings.json")
    assert not (tmp_path / "store" / "abort").exists()
    with lq.MessageStore.open(tmp_path / "store") as store:
        assert len(list(store.scan())) == 1


@pytest.mark.usefixtures("keeps_abort")
def test_a_slave_that_ends_when_it_has_the_whole_log(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps(SIZES))
    master = tmp_path / "m"
    # The close of this store logs the error, and raises none.
    with opened(master) as store:
        fill(store, 20)
    assert (store.close_problem or "").startswith(f"{master / 'abort'}: Input/output error")
    with serving(master) as address:
        options = ["--from", 0, "--once", "--config", sizes]
        result = run("replicate", address, "--into", tmp_path / "s", *options, code=4)
    check(result.stderr, tmp_path / "s")
    assert "has the master's log" not in result.stderr


def test_an_interrupt_during_the_close(
    tmp_path: Path, put_in: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Disk, path: Path) -> None:
        if path.name == "abort":
            signal.raise_signal(signal.SIGINT)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(self, path)

    unlink = Disk.unlink
    with opened(tmp_path / "m") as store:
        fill(store, 1)
    monkeypatch.setattr(Disk, "unlink", failing)
    check(put_in(write(tmp_path / "a.jsonl", line()), code=4).stderr, tmp_path / "store")
    with serving(tmp_path / "m") as address:
        words = ["--into", tmp_path / "s", "--from", 0, "--once"]
        check(run("replicate", address, *words, code=4).stderr, tmp_path / "s")


@pytest.mark.usefixtures("keeps_abort", "interrupted")
def test_servers_that_ctrl_c_ends(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 1)
    served = run("serve-master", tmp_path / "s", "--listen", "127.0.0.1:0", code=4)
    check(served.stderr, tmp_path / "s")
    words = ["--listen", "127.0.0.1:0", "--name-port", "0"]
    check(run("broker", tmp_path / "s", *words, code=4).stderr, tmp_path / "s")


@pytest.mark.usefixtures("interrupted")
def test_servers_that_close_their_store(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        fill(store, 1)
    assert store.close_problem is None
    run("serve-master", tmp_path / "s", "--listen", "127.0.0.1:0", code=130)
    run("broker", tmp_path / "s", "--listen", "127.0.0.1:0", "--name-port", "0", code=130)
    assert not (tmp_path / "s" / "abort").exists()
