"""Stores for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from logquarry.testing.builder import StoreBuilder

HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e</script>\x9b1m\x7f"


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    """40 messages of two topics in three files; names and bodies are hostile to terminals."""
    root = tmp_path / "small"
    with StoreBuilder(root, file_size=1 << 12, queue_file_size=2_000) as builder:
        for number in range(40):
            builder.put(
                "orders" if number % 4 else f"evil{HOSTILE.replace('/', '')}",
                f"body {number} {HOSTILE}".encode(),
                queue_id=number % 2,
                properties_string=f"KEYS\x01key{number} grp{number % 3}\x02UNIQ_KEY\x01U{number}"
                f"\x02TAGS\x01Tag{number % 2}{HOSTILE if number == 3 else ''}\x02city\x01Zürich",
                store_timestamp=1_700_000_000_000 + 1_000 * number,
            )
    return root


@pytest.fixture
def damaged_store(small_store: Path) -> Path:
    """The same with a harmed body in the first file."""
    file = small_store / "commitlog" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[data.index(b"body 5 ")] ^= 0xFF
    file.write_bytes(data)
    return small_store
