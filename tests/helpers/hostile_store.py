"""A small store with names and texts that attack terminals and pages."""

from __future__ import annotations

from pathlib import Path

from logquarry.testing.builder import StoreBuilder

HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e</script>\x9b1m\x7f"
EVIL_TOPIC = f"evil{HOSTILE.replace('/', '')}"
FIRST_TIME = 1_700_000_000_000


def make_small_store(root: Path) -> Path:
    """40 messages of two topics in three files."""
    with StoreBuilder(root, file_size=1 << 12, queue_file_size=2_000) as builder:
        for number in range(40):
            builder.put(
                "orders" if number % 4 else EVIL_TOPIC,
                f"body {number} {HOSTILE}".encode(),
                queue_id=number % 2,
                properties_string=f"KEYS\x01key{number} grp{number % 3}\x02UNIQ_KEY\x01U{number}"
                f"\x02TAGS\x01Tag{number % 2}{HOSTILE if number == 3 else ''}\x02city\x01Zürich",
                store_timestamp=FIRST_TIME + 1_000 * number,
            )
    return root


def harm(store: Path) -> Path:
    """Damage the body of message 5, in the first file."""
    file = store / "commitlog" / f"{0:020d}"
    data = bytearray(file.read_bytes())
    data[data.index(b"body 5 ")] ^= 0xFF
    file.write_bytes(data)
    return store
