"""Programs that use a store whose files lose pages: what their tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.compiled import is_compiled
from tests.helpers import python_process

FILE = 1 << 20
COUNT = 3_000

handled = pytest.mark.skipif(not is_compiled(), reason="only the compiled handler watches maps")


MODES = pytest.mark.parametrize(
    "mode",
    [
        {},
        {"LOGQUARRY_SIGBUS": "off"},
        {"LOGQUARRY_COMPILED": "off"},
        {"LOGQUARRY_COMPILED": "off", "LOGQUARRY_KERNELS": "off"},
    ],
    ids=["as installed", "without the handler", "interpreted", "interpreted without kernels"],
)


START = """
import ctypes, mmap, os, shutil, sys
import logquarry as lq
from logquarry.log import batches, columns, codec, frames, exported, lost_pages
from logquarry.read import get_kernel
root = sys.argv[1]
config = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=40_000,
    max_hash_slot_num=5_000, max_index_num=20_000,
)
def log():
    return os.path.join(root, "commitlog", "00000000000000000000")
def lose():
    os.truncate(log(), 300_003)
def body(number):
    return f"message {number} ".encode() * 20
TRUTH = {body(number) for number in range(3_000)}
done = []
def hooked(module, name, after=False):
    before = getattr(module, name)
    def call(*arguments, **options):
        if not after and not done:
            done.append(lose())
        found = before(*arguments, **options)
        if after and not done:
            done.append(lose())
        return found
    setattr(module, name, call)
    return lambda: setattr(module, name, before)
def hook(place):
    done.clear()
    module, _, name = place.rstrip("+").rpartition(".")
    return hooked(eval(module), name, after=place.endswith("+"))
"""


def run(code: str, *arguments: str | Path) -> str:
    """Run START and a program, which must end with 0; return what it printed."""
    done = python_process.run(START + code, *arguments)
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-1500:])
    return done.stdout


def use(mode: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes run in a mode."""
    for name, value in mode.items():
        monkeypatch.setenv(name, value)


def make_store(root: Path) -> Path:
    """A store of 3,000 messages, as the programs expect it."""
    config = lq.StoreConfig(
        mapped_file_size_commit_log=FILE,
        mapped_file_size_consume_queue=40_000,
        max_hash_slot_num=5_000,
        max_index_num=20_000,
    )
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for number in range(COUNT):
            body = f"message {number} ".encode() * 20
            store.put(lq.Message("orders", body, keys=f"k{number % 50}", tags="a"))
    return root
