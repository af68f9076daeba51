"""The shape of an index is guessed from files that a broker is writing to."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

from logquarry.read.index_file import _last_nonzero_word

_WRITER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    words = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
for _ in range(50_000_000):
    words[60:64] = bytes(4)
    words[60:64] = b"more"
"""


def test_words_that_change_while_they_are_looked_at_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(bytes(100) + b"last" + bytes(40_000))
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            with path.open("rb") as file:
                words = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            found = {_last_nonzero_word(words) for _ in range(20_000)}
        finally:
            writer.kill()
    assert found == {(100 - 40) // 4}
