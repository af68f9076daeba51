"""``serve-master`` and ``replicate``: copies of logs and config/, errors, and clean ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import logquarry as lq
from logquarry import replication
from logquarry.cli.output import Output
from logquarry.cli.replication import _lines, client_tls
from logquarry.errors import UsageError
from logquarry.format import broker_json
from logquarry.replication import HaMaster, SlaveStatus
from tests.cli.test_process import COMMAND
from tests.helpers.command import run
from tests.helpers.files import bytes_of
from tests.helpers.replication import fill, log_bytes, make_certificate, opened

SIZES = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": 2_000,
    "maxHashSlotNum": 500,
    "maxIndexNum": 2_000,
}


@contextmanager
def serving_at(
    *arguments: object, ports: int = 1, ends: int = signal.SIGINT, code: int = 130
) -> Iterator[list[str]]:
    """Start a master, yield its addresses, and send it a signal at the end of the block."""
    process = subprocess.Popen(
        [*COMMAND, "serve-master", *map(str, arguments), "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(ports)]
        assert all(line.startswith("serving ") for line in lines)
        yield [line.split()[-1] for line in lines]
        process.send_signal(ends)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def serving(*arguments: object, ends: int = signal.SIGINT, code: int = 130) -> Iterator[str]:
    """Start a master that serves only its log, and yield its address."""
    with serving_at(*arguments, ends=ends, code=code) as (address,):
        yield address


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES))
    return path


def test_a_whole_log_once(tmp_path: Path, config: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 200)
    with serving(tmp_path / "m") as address:
        options = ["--from", 0, "--once", "--config", config]
        result = run("replicate", address, "--into", tmp_path / "s", *options)
        assert f"up to {end}" in result.stderr and result.stdout == ""
        again = run("replicate", address, "--into", tmp_path / "s", "--once", "--quiet")
        assert again.stderr == ""
    for name in ("m", "s"):
        assert not (tmp_path / name / "abort").exists(), "it was closed in order"
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)
    assert "equal" in run("diff", tmp_path / "m", tmp_path / "s").stdout
    run("verify", tmp_path / "s")


def test_the_last_file_and_a_full_history(tmp_path: Path, config: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 300)
    options = ["--once", "--config", config, "--quiet"]
    with serving(tmp_path / "m", ends=signal.SIGTERM, code=143) as address:
        run("replicate", address, "--into", tmp_path / "last", *options)
    with serving(tmp_path / "m", "--full-history", "--transfer-size", "1k") as address:
        run("replicate", address, "--into", tmp_path / "all", *options)
    with lq.MessageStore.open(tmp_path / "last") as last:
        assert (last.min_offset, last.max_offset) == (end - end % 65_536, end)
    with lq.MessageStore.open(tmp_path / "all") as whole:
        assert (whole.min_offset, whole.max_offset) == (0, end)


def test_a_store_of_another_master_is_refused(tmp_path: Path, config: Path) -> None:
    for name, body in (("m", b"one"), ("s", b"two")):
        with opened(tmp_path / name) as store:
            store.put(lq.Message("t", body=body))
    with serving(tmp_path / "m", "--config", config) as address:
        options = ["--into", tmp_path / "s", "--config", config]
        result = run("replicate", address, *options, code=4)
    assert "logquarry diff" in result.stderr and str(tmp_path / "s") in result.stderr


def test_config_too(tmp_path: Path, config: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 20)
    folder = tmp_path / "m" / "config"
    folder.mkdir(exist_ok=True)
    offsets = '{"offsetTable":{"t@g":{0:5}}}'
    (folder / "consumerOffset.json").write_text(offsets)
    options = ["--from", 0, "--once", "--config", config]
    listens = ("--listen-config", "127.0.0.1:0")
    with serving_at(tmp_path / "m", *listens, ports=2) as (log, asked):
        into = ["--into", tmp_path / "s", "--sync-config"]
        result = run("replicate", log, *into, asked, *options)
        assert f"up to {end}" in result.stderr
        assert "the master has no delayOffset.json" in result.stderr
        found = (tmp_path / "s" / "config" / "consumerOffset.json").read_bytes()
        assert broker_json.decode_consumer_offsets(found) == {("t", "g"): {0: 5}}
        # An invalid file is reported, and the slave keeps its own.
        (folder / "consumerOffset.json").write_text("{ torn")
        result = run("replicate", log, *into, asked, *options, code=4)
        assert "consumerOffset.json cannot be served" in result.stderr
        assert (tmp_path / "s" / "config" / "consumerOffset.json").read_bytes() == found
        # No server listens there.
        result = run("replicate", log, *into, "127.0.0.1:1", *options, code=4)
        assert "config/ was not copied" in result.stderr


def test_ctrl_c_does_not_wait_for_the_first_copy_of_config(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker accepts the connection, and never answers."""
    patient = partial(replication.ConfigSyncOptions, timeout=120.0)
    monkeypatch.setattr(replication, "ConfigSyncOptions", patient)
    with opened(tmp_path / "m") as store:
        fill(store, 1)

    def interrupt() -> None:
        with silent.accept()[0] as connection:
            connection.recv(1)
            os.kill(os.getpid(), signal.SIGINT)
            # The slave ends the connection.
            while connection.recv(1 << 16):
                pass
            is_ended.set()

    is_ended = threading.Event()
    with serving(tmp_path / "m") as log, socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=interrupt, daemon=True).start()
        into = ["--into", tmp_path / "s", "--sync-config", f"127.0.0.1:{silent.getsockname()[1]}"]
        started = time.monotonic()
        result = run("replicate", log, *into, "--once", "--config", config, code=130)
        assert is_ended.wait(60) and time.monotonic() - started < 100
    assert "was not copied" not in result.stderr
    assert not (tmp_path / "s" / "abort").exists()


def test_a_new_slave_makes_batch_queues(tmp_path: Path) -> None:
    """The slave copies topics.json before it gets the first frame."""
    config = tmp_path / "broker.conf"
    config.write_text("".join(f"{name} = {value}\n" for name, value in SIZES.items()))
    folder = tmp_path / "m" / "config"
    folder.mkdir(parents=True)
    table = {"b": {"topicName": "b", "attributes": {"queue.type": "BatchCQ"}}}
    (folder / "topics.json").write_text(json.dumps({"topicConfigTable": table}))
    sizes = lq.StoreConfig.from_mapping(SIZES)
    with lq.MessageStore.open(tmp_path / "m", mode="rw", config=sizes) as store:
        for _ in range(3):
            store.put_batch([lq.Message("b", b"1"), lq.Message("b", b"2")])
        assert store.wait_dispatched(timeout=60)
    listens = ("--listen-config", "127.0.0.1:0", "--full-history", "--config", config)
    with serving_at(tmp_path / "m", *listens, ports=2) as (log, asked):
        into = ["--into", tmp_path / "s", "--sync-config", asked]
        # Without topics.json, the slave would write simple queues.
        unserved = ["--into", tmp_path / "s", "--sync-config", "127.0.0.1:1"]
        result = run("replicate", log, *unserved, "--once", "--config", config, code=4)
        assert "config/ was not copied" in result.stderr and "topics.json" in result.stderr
        run("replicate", log, *into, "--once", "--config", config)
    assert not (tmp_path / "s" / "consumequeue" / "b").exists()
    assert bytes_of(tmp_path / "s" / "batchconsumequeue") == bytes_of(
        tmp_path / "m" / "batchconsumequeue"
    )


def test_a_master_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """With a mistyped path, an empty master would start, and all slaves would be ahead of it."""
    result = run("serve-master", tmp_path / "mistyped", "--listen", "127.0.0.1:0", code=3)
    assert "mistyped" in result.stderr and not list(tmp_path.iterdir())


def test_a_master_that_fails_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: HaMaster) -> None:
        raise RuntimeError("a bug")

    with opened(tmp_path / "m") as store:
        fill(store, 3)
    monkeypatch.setattr(HaMaster, "_turn", failing)
    result = run("serve-master", tmp_path / "m", "--listen", "127.0.0.1:0", code=4)
    assert "a bug" in result.stderr
    assert not (tmp_path / "m" / "abort").exists(), "it was closed in order"


def test_notes_name_the_master_once(capsys: pytest.CaptureFixture[str]) -> None:
    status = SlaveStatus("m:1", False, 0, None, 0, 0, False, "m:1: refused", False, 0)
    slave = SimpleNamespace(status=lambda: status)
    lines = _lines(Output(quiet=False), cast(Any, slave), None, ends=False)
    next(lines)
    status = status._replace(is_connected=True, trouble="")
    next(lines)
    next(lines)
    assert capsys.readouterr().err == "m:1: refused\nm:1: connected\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["replicate", "m:1", "--into", "s", "--tls-name", "x"], "--tls-name need --tls"),
        (["replicate", "m:1", "--into", "s", "--tls", "--tls-key", "x"], "needs --tls-cert"),
        (["replicate", "m:1", "--into", "s", "--tls", "--tls-name", ".x"], "--tls-name takes"),
        (["serve-master", "m", "--rate", "abc"], "--rate takes a size"),
        (["serve-master", "m", "--transfer-size", "0"], "--transfer-size takes a size"),
    ],
)
def test_usage_names_the_option(arguments: list[str], reason: str) -> None:
    assert reason in run(*arguments, code=2).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["replicate", "nowhere", "--into", "s"],
        ["replicate", "127.0.0.1:99999", "--into", "s"],
        ["replicate", f"127.0.0.1:{'1' * 5_000}", "--into", "s"],
        ["replicate", f"{'a' * 70}.b:1", "--into", "s"],
        ["replicate", "127.0.0.1:1"],
        ["replicate", "127.0.0.1:1", "--into", "s", "--tls-ca", "x"],
        ["replicate", "127.0.0.1:1", "--into", "s", "--sync-config", "10911"],
        ["replicate", "127.0.0.1:1", "--into", "s", "--from", str(1 << 63)],
        ["serve-master", "m", "--listen", "10912"],
        ["serve-master", "m", "--listen-config", "10911"],
        ["serve-master", "m", "--allow", "everybody"],
        ["serve-master", "m", "--rate", "quick"],
        ["serve-master", "m", "--tls-key", "x"],
        ["serve-master", "m", "--tls-cert", "not-there.pem"],
        ["serve-master", "m", "--max-connections", "0"],
    ],
)
def test_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(*arguments, code=2)
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_once_gives_up_at_a_wrong_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = run("replicate", f"127.0.0.1:{port}", "--into", tmp_path / "s", "--once", code=4)
    assert "no answer from a master in 5 attempts" in result.stderr
    assert "Connection refused" in result.stderr and "haListenPort" in result.stderr


def test_once_gives_up_if_a_known_master_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the slave's store was opened, the master had answered at this port."""
    monkeypatch.setattr("logquarry.cli.replication._await_master", lambda *_, **__: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    result = run("replicate", f"127.0.0.1:{port}", "--into", tmp_path / "s", "--once", code=4)
    words = f"s does not have all of the master's log: 127.0.0.1:{port}: "
    assert words in result.stderr and "Connection refused" in result.stderr
    assert "it continues after" in result.stderr and "haListenPort" not in result.stderr


def _state(root: Path) -> dict[str, object]:
    names = {str(path.relative_to(root)): path.is_dir() for path in root.rglob("*")}
    return {"names": names, **bytes_of(root)}


@pytest.mark.parametrize("accepts", [False, True])
def test_a_store_is_unchanged_until_the_master_answers(tmp_path: Path, accepts: bool) -> None:
    with opened(tmp_path / "s", message_delay_level="1s 2s") as store:
        fill(store, 20)
    (tmp_path / "s" / "abort").touch()
    before = _state(tmp_path / "s")
    config = tmp_path / "impatient.json"
    config.write_text(json.dumps({"haSendHeartbeatInterval": 50, "haHousekeepingInterval": 100}))
    with socket.create_server(("127.0.0.1", 0)) as server:
        # The system accepts connections in the server's name, but nothing answers over them.
        port = server.getsockname()[1]
        if not accepts:
            server.close()
        for name in ("s", "new"):
            options = ["--into", tmp_path / name, "--once", "--config", config]
            result = run("replicate", f"127.0.0.1:{port}", *options, code=4)
            assert "no answer from a master in 5 attempts" in result.stderr
    assert _state(tmp_path / "s") == before
    assert not (tmp_path / "new").exists()


def test_a_store_in_use_is_refused_before_the_master_answers(tmp_path: Path) -> None:
    with opened(tmp_path / "s"):
        options = ["--into", tmp_path / "s"]
        assert "open" in run("replicate", "127.0.0.1:1", *options, code=4).stderr


@pytest.mark.parametrize("option", ["--listen", "--listen-config"])
def test_a_master_without_a_free_address_changes_nothing(tmp_path: Path, option: str) -> None:
    with opened(tmp_path / "m", message_delay_level="1s 2s") as store:
        fill(store, 20)
    before = _state(tmp_path / "m")
    with socket.create_server(("127.0.0.1", 0)) as server:
        used = f"127.0.0.1:{server.getsockname()[1]}"
        listens = {"--listen": "127.0.0.1:0", option: used}
        arguments = [word for pair in listens.items() for word in pair]
        assert "in use" in run("serve-master", tmp_path / "m", *arguments, code=3).stderr
    assert _state(tmp_path / "m") == before


def test_a_master_of_one_slave_serves_it_after_its_answer(tmp_path: Path, config: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 300)
    with serving(tmp_path / "m", "--max-connections", 1, "--full-history") as address:
        options = ["--into", tmp_path / "s", "--once", "--config", config]
        assert f"up to {end}" in run("replicate", address, *options).stderr


@pytest.mark.parametrize("is_valid", [True, False])
def test_the_key_can_be_a_named_pipe(tmp_path: Path, is_valid: bool) -> None:
    """A shell makes such a pipe for ``--tls-key <(command)``. Its writer writes only once."""
    certificate, key = make_certificate(tmp_path)
    data, pipe = key.read_bytes() if is_valid else b"no key\n", tmp_path / "pipe"
    os.mkfifo(pipe)
    results: list[object] = []

    def load() -> None:
        try:
            results.append(client_tls(True, None, str(certificate), str(pipe)))
        except UsageError as error:
            results.append(str(error))

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    with pipe.open("wb") as writer:
        writer.write(data)
    loading.join(20)
    (result,) = results
    assert isinstance(result, ssl.SSLContext) if is_valid else str(result).startswith("TLS: ")


@pytest.mark.parametrize("option", ["--tls-cert", "--tls-key", "--tls-ca"])
@pytest.mark.parametrize("reason", ["No such file or directory", "Is a directory"])
def test_an_error_about_tls_names_the_unreadable_file(
    tmp_path: Path, option: str, reason: str
) -> None:
    certificate, key = make_certificate(tmp_path)
    wrong = tmp_path / "wrong"
    if reason == "Is a directory":
        wrong.mkdir()
    files = {"--tls-ca": certificate, "--tls-cert": certificate, "--tls-key": key} | {option: wrong}
    with pytest.raises(UsageError) as caught:
        client_tls(True, *map(str, files.values()))
    assert str(caught.value) == f"{option}: {wrong}: cannot be read: {reason}"
