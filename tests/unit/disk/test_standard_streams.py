"""A process whose standard streams are closed: no file of a store gets their descriptors.

The tests close the descriptors in a shell, as ``<&- 2>&-`` does in a script.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry import standard_streams
from tests.helpers.operator_faults import COUNT, make_store

WRITER = """
import os, subprocess, sys
import logquarry as lq

with lq.MessageStore.open(sys.argv[1], mode="rw"):
    for number in (1, 2):
        os.write(number, b"a message of a library in C" * 100)
    subprocess.run(["sh", "-c", "echo a message of another program; echo another message >&2"])
"""
COMMAND = """
import os, sys
from logquarry.cli.main import main

sys.argv[1:] = ["--version"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
for number in range(3):
    assert os.get_inheritable(number)
"""


def run(program: str, closed: str, *arguments: Path) -> None:
    words = [sys.executable, "-c", program, *map(str, arguments)]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    subprocess.run([*shell, *words], check=True, timeout=120, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("closed", ["<&- 2>&-", "<&- >&- 2>&-"])
def test_messages_to_closed_streams_do_not_change_a_store(tmp_path: Path, closed: str) -> None:
    store = make_store(tmp_path / "store")
    run(WRITER, closed, store)
    report = lq.verify(store)
    assert not report.findings
    assert report.counts["messages"] == COUNT


def test_a_command_opens_closed_streams() -> None:
    run(COMMAND, "<&- >&- 2>&-")


def test_open_streams_stay_as_they_are() -> None:
    before = [os.fstat(number) for number in range(3)]
    standard_streams.reserve()
    assert [os.fstat(number) for number in range(3)] == before
