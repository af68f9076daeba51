"""``messages``: filters, redaction, damage, and escaping for terminals."""

from __future__ import annotations

import base64
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from logquarry.log import columns, exported
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from tests.helpers.command import expected_messages, jsonl, run
from tests.helpers.hostile_store import EVIL_TOPIC as EVIL
from tests.helpers.hostile_store import FIRST_TIME as BASE


def numbers(*arguments: object) -> list[int]:
    """The numbers of the small store's messages that the command prints."""
    found = [base64.b64decode(message["body"]) for message in jsonl(*arguments)]
    return [int(body.split()[1]) for body in found]


# ---------------------------------------------------------------------------------------- filters
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], lambda n: True),
        (["--topic", "orders"], lambda n: n % 4),
        (["--topic", f"{EVIL},absent"], lambda n: n % 4 == 0),
        (["--topic", "orders", "--topic", EVIL], lambda n: True),
        (["--queue", "1"], lambda n: n % 2),
        (["--queue", "0,1"], lambda n: True),
        (["--topic", "orders", "--queue", "0"], lambda n: n % 4 == 2),
        (["--topic", "orders", "--queue", "0", "--queue-offset", "3:5"], lambda n: n in (14, 18)),
        (["--topic", "orders", "--queue", "0", "--queue-offset", "8:"], lambda n: n in (34, 38)),
        (["--topic", "orders", "--queue", "0", "--queue-offset", ":1"], lambda n: n == 2),
        (["--topic", "orders", "--queue", "0", "--queue-offset", "1"], lambda n: n == 6),
        (["--key", "key7"], lambda n: n == 7),
        (["--key", "grp1"], lambda n: n % 3 == 1),
        (["--key", "U9", "--key", "key8"], lambda n: n in (8, 9)),
        (["--key", "grp1 grp2"], lambda n: False),
        (["--tag", "Tag0"], lambda n: n % 2 == 0),
        (["--tag", "Tag0 || Tag1"], lambda n: n != 3),
        (["--tag", "*"], lambda n: True),
        (["--since", str(BASE + 30_000)], lambda n: n >= 30),
        (["--until", str(BASE + 30_000)], lambda n: n < 30),
        (["--since", "2023-11-14T22:13:50Z"], lambda n: n >= 30),
        (["--since", "2023-11-14T23:13:50+01:00"], lambda n: n >= 30),
        (["--since", "2023-11-14 22:13:50"], lambda n: n >= 30),
        (["--since", "2023-11-14T22:13:49.999001Z"], lambda n: n >= 30),
        (["--until", "2023-11-14T22:13:50.000001Z"], lambda n: n <= 30),
        (["--until", "2023-11-15"], lambda n: True),
        (["--since", "2023-11-15"], lambda n: False),
        (["--grep", r"^body 1\d "], lambda n: 10 <= n < 20),
        (["--limit", "7"], lambda n: n < 7),
        (["--limit", "0"], lambda n: False),
        (["--topic", "orders", "--limit", "2"], lambda n: n in (1, 2)),
    ],
)
def test_filters(small_store: Path, options: list[str], wanted: Any) -> None:
    assert numbers(small_store, *options) == [n for n in range(40) if wanted(n)]


def test_filters_agree_with_queues_and_index_of_a_real_broker(golden: Path) -> None:
    scenario = golden / "real-broker"
    store, everything = scenario / "store", expected_messages(scenario)
    key = everything[100]["keys"].split()[0]
    for options, wanted in (
        (["--topic", "TxTopic"], lambda m: m["topic"] == "TxTopic"),
        (["--key", key], lambda m: key in (m["keys"] or "").split()),
        (["--tag", "TagB"], lambda m: m["tags"] == "TagB"),
        (
            ["--topic", "MainTopic", "--queue", "2", "--queue-offset", "10:20"],
            lambda m: (
                (m["topic"], m["queue_id"]) == ("MainTopic", 2) and 10 <= m["queue_offset"] < 20
            ),
        ),
    ):
        found = [message["physical_offset"] for message in jsonl(store, *options)]
        assert found == [m["physical_offset"] for m in everything if wanted(m)]
        assert found


def test_one_message_by_offset_and_by_id(golden: Path) -> None:
    scenario = golden / "real-broker"
    wanted = expected_messages(scenario)[17]
    (by_offset,) = jsonl(scenario / "store", "--offset", wanted["physical_offset"])
    (by_id,) = jsonl(scenario / "store", "--id", wanted["message_id"].lower())
    assert {name: by_offset[name] for name in wanted} == wanted
    assert by_id == by_offset


def test_no_message_there(golden: Path) -> None:
    store = golden / "real-broker" / "store"
    wanted = expected_messages(golden / "real-broker")[17]
    assert "error" in run("messages", store, "--offset", 1, code=1).stderr
    # A client's message id is the UNIQ_KEY.
    result = run("messages", store, "--id", wanted["uniq_key"], code=1)
    assert "--key" in result.stderr and not result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--since", "yesterday"],
        ["--until", "2023-13-01"],
        ["--queue", "one"],
        ["--queue-offset", "a:b"],
        ["--queue-offset", ":"],
        ["--queue-offset", "1" * 5_000],
        ["--queue-offset", f"1:{'1' * 5_000}"],
        ["--queue", "1" * 5_000],
        ["--limit", "1" * 5_000],
        ["--since", "1" * 5_000],
        ["--grep", "("],
        ["--limit", "-1"],
        ["--redact", "names"],
        ["--on-damage", "ignore"],
        ["--offset", "0", "--topic", "orders"],
        ["--offset", "0", "--id", "00"],
        ["--id", "00"],
        ["--config", "/nowhere"],
        ["--unknown"],
        ["--topic", ","],
        ["--topic", ""],
        ["--queue", ","],
        ["--key", ""],
        ["--tag", "||"],
        ["--tag", ""],
        ["--since", "2", "--until", "1"],
        ["--queue-offset", "5:4"],
    ],
)
def test_usage_errors(small_store: Path, options: list[str]) -> None:
    result = run("messages", small_store, *options, code=2)
    assert not result.stdout and result.stderr


def test_seconds_for_milliseconds_are_remarked_on(small_store: Path) -> None:
    assert "1970" in run("messages", small_store, "--since", "1700000000").stderr


# -------------------------------------------------------------------------------- bodies, redaction
def test_decompress(golden: Path) -> None:
    scenario = golden / "real-broker"
    stored = jsonl(scenario / "store")
    content = jsonl(scenario / "store", "--decompress")
    packed = [i for i, message in enumerate(stored) if message["sys_flag"] & 1]
    assert packed
    for i, (before, after) in enumerate(zip(stored, content, strict=True)):
        assert (before == after) == (i not in packed)
        assert {**before, "body": None} == {**after, "body": None}
    # With --decompress, --grep searches the decompressed body.
    one = next(i for i in packed if re.search(rb"[a-z]{12}", base64.b64decode(content[i]["body"])))
    word = re.search(rb"[a-z]{12}", base64.b64decode(content[one]["body"]))
    assert word is not None
    found = jsonl(scenario / "store", "--decompress", "--grep", word[0].decode())
    assert content[one] in found


def test_redaction(small_store: Path) -> None:
    plain = jsonl(small_store)
    hidden = {
        "body": {"body", "body_crc"},
        "properties": {
            *("properties", "properties_string", "tags", "keys", "uniq_key", "tags_code"),
        },
        "hosts": {"born_host", "store_host", "message_id", "uniq_key"},
    }
    for word, names in hidden.items():
        for before, after in zip(plain, jsonl(small_store, "--redact", word), strict=True):
            assert list(after) == list(before)
            for name, value in after.items():
                if name in names:
                    assert value is None
                elif word == "hosts" and name in ("properties", "properties_string"):
                    assert "UNIQ_KEY" not in value and "KEYS" in value
                else:
                    assert value == before[name]
    everything = jsonl(small_store, "--redact", "body,properties,hosts")
    assert all(m["topic"] and m["size"] for m in everything)
    text = run("messages", small_store, "--redact", "body,properties,hosts").stdout
    assert not any(word in text for word in ("body 1", "key1", "Tag1", "127.0.0.1", "U1"))


def test_bad_bytes_in_properties(golden: Path) -> None:
    # Some golden stores have such bytes; their lines hold the bytes unchanged.
    found = [m for m in jsonl(golden / "sysflags" / "store") if "\ufffd" in m["properties_string"]]
    for message in found:
        data = base64.b64decode(message["properties_base64"])
        assert data.decode("utf-8", "replace") == message["properties_string"]
    redacted = jsonl(golden / "sysflags" / "store", "--redact", "properties")
    assert not any("properties_base64" in message for message in redacted)


def test_lines_are_the_reference_s(golden: Path) -> None:
    for name in ("sysflags", "single", "multidispatch", "ipv6", "delay"):
        layout = StoreLayout.open(golden / name / "store")
        decoding = Decoding(broker="b", delay_levels_ms=layout.delay_levels_ms)
        for event in LogReader(layout).events():
            if not isinstance(event, Run):
                continue
            reference = columns.messages(event.window, event.rows, decoding)
            for words in (None, "hosts", "properties", "body,hosts"):
                hidden = exported.redaction(words)
                parts = exported.line_parts(event.window, event.rows, decoding, hidden)
                lines = [line for _, found in parts for line in found]
                for line, message in zip(lines, reference, strict=True):
                    document = exported.redacted(message.to_json(), hidden)
                    assert list(json.loads(line).items()) == list(document.items())
                    assert line == exported.line(document)


# ------------------------------------------------------------------------------------- terminals
def test_hostile_text_does_not_reach_a_terminal(small_store: Path) -> None:
    for arguments in (["messages", small_store], ["messages", small_store, "--jsonl"]):
        result = run(*arguments)
        for text in (result.stdout, result.stderr):
            assert not set(text) & {"\x1b", "\x07", "\x7f", "\x9b", "\u202e"}
    for command in ("info", "verify"):
        document = run(command, small_store, "--json").stdout
        assert document.isascii() and "\x7f" not in document.replace("\n", "")
        text = run(command, small_store).stdout
        assert "evil\\x1b" in text or command == "verify"
        assert not set(text) & {"\x1b", "\x07", "\x7f", "\x9b", "\u202e"}


def test_text_output(golden: Path) -> None:
    result = run("messages", golden / "real-broker" / "store", "--limit", "2")
    first = result.stdout.splitlines()[:2]
    assert first[0].startswith("0  2026-11-20T11:57:23.807Z  OrderTopic queue 0 offset 0  ")
    assert "tags TagA  keys key0 grp0" in first[0]
    assert "compressed" in first[1]
    assert not result.stderr


# ---------------------------------------------------------------------------------------- damage
def test_damage_fails_by_default(damaged_store: Path) -> None:
    result = run("messages", damaged_store, "--jsonl", code=1)
    assert len(result.stdout.splitlines()) == 5
    assert "00000000000000000000" in result.stderr and "bad_body_crc" in result.stderr


def test_damage_stop(damaged_store: Path) -> None:
    result = run("messages", damaged_store, "--jsonl", "--on-damage", "stop")
    assert len(result.stdout.splitlines()) == 5
    assert "stopped at the first damaged place" in result.stderr


def test_damage_skip(damaged_store: Path) -> None:
    assert numbers(damaged_store, "--on-damage", "skip") == [n for n in range(40) if n != 5]
    result = run("messages", damaged_store, "--on-damage", "skip")
    assert "skipped 1 damaged place" in result.stderr and "bad_body_crc" in result.stderr
    assert not run("messages", damaged_store, "--on-damage", "skip", "--quiet").stderr


def test_torn_tail(golden: Path) -> None:
    store = golden / "unclean" / "half-frame" / "store"
    result = run("messages", store, "--jsonl")
    assert len(result.stdout.splitlines()) == 173
    assert "torn tail" in result.stderr
    assert "torn_tail" in run("messages", store, "--jsonl", "--on-damage", "fail", code=1).stderr


def test_a_store_whose_log_is_missing_is_refused(small_store: Path) -> None:
    shutil.rmtree(small_store / "commitlog")
    result = run("messages", small_store, code=4)
    assert not result.stdout and "is a disk not mounted" in result.stderr
    (small_store / "commitlog").mkdir()
    assert "is a disk not mounted" in run("messages", small_store, "--jsonl", code=4).stderr
    (small_store / "checkpoint").unlink(missing_ok=True)
    shutil.rmtree(small_store / "consumequeue")
    # A new store has no messages, and needs no warning.
    assert not run("messages", small_store).stderr


def test_an_unknown_topic_is_named_beside_the_nearest(small_store: Path, tmp_path: Path) -> None:
    where = [small_store, "--topic", "order"]
    for command in (
        ["messages", *where, "--jsonl"],
        ["export", *where, "--format", "jsonl", "--to", "-"],
    ):
        result = run(*command)
        assert not result.stdout
        assert "no queue has the topic 'order' (did you mean 'orders'?)" in result.stderr
    assert not run("messages", *where, "--quiet").stderr


def test_a_hostile_name_of_a_store_does_not_reach_a_terminal(
    small_store: Path, tmp_path: Path
) -> None:
    evil = shutil.copytree(small_store, tmp_path / "evil\x1b[31m")
    for command in ("info", "stats", "verify"):
        stores = [small_store, evil] if command == "verify" else [evil]
        text = run(command, *stores).stdout
        assert "evil\\x1b" in text and "\x1b" not in text
