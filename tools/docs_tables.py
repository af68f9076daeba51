"""Write the pages of the docs whose tables come from the code.

Run ``python -m tools.docs_tables``.
"""

from __future__ import annotations

from pathlib import Path

from logquarry.format import (
    batch,
    checkpoint,
    frame,
    index,
    queue_entry,
    timer,
)
from logquarry.format.fields import Layout
from logquarry.log import schema
from logquarry.protocol import remoting_codes
from logquarry.repair import findings
from tools import compatibility

DOCS = Path(__file__).parent.parent / "docs"

FORMATS: tuple[tuple[str, tuple[Layout, ...], str], ...] = (
    (
        "Message frame",
        (frame.HEAD,),
        "BORNHOST (address and port) follows: 8 bytes, or 20 if bit 0x10 of SYSFLAG is set. Then:",
    ),
    (
        "",
        (frame.STORE_TIME,),
        "STOREHOSTADDRESS follows: 8 bytes, or 20 if bit 0x20 of SYSFLAG is set. Then:",
    ),
    (
        "",
        (frame.TAIL,),
        "These parts follow:\n\n"
        "| part | bytes |\n"
        "|---|---|\n"
        "| body | BODYLEN |\n"
        "| TOPICLEN, signed | 1; 2 with magic daa320ab |\n"
        "| topic | TOPICLEN |\n"
        "| PROPERTIESLEN, signed | 2 |\n"
        "| properties | PROPERTIESLEN |\n\n"
        "A frame has 91 bytes if it has no body, no topic and no properties, both hosts are IPv4, "
        "and the field TOPICLEN is 1 byte wide.",
    ),
    (
        "Blank",
        (frame.BLANK,),
        "A blank is the last item of a file. The other bytes of a blank are undefined.",
    ),
    ("Consume queue entry", (queue_entry.LAYOUT,), ""),
    (
        "Batch queue entry (5.x)",
        (batch.ENTRY,),
        "Entries can have different values of `count`. So the position of an entry does not follow "
        "from a queue offset,\nand readers search for the entry by `base`.",
    ),
    (
        "Consume queues in RocksDB (5.x)",
        (queue_entry.ENTRY, queue_entry.BOUND, queue_entry.DISPATCHED_END),
        "RocksDB stores these three structures as values. The next table shows the key of each "
        "value.\nA byte 01 separates the parts of a key:\n\n"
        "| value | key |\n"
        "|---|---|\n"
        "| entry | length of the topic (4 bytes), topic, queue id (4 bytes), "
        "queue offset (8 bytes) |\n"
        "| bound (column family `offset`) | length of the topic (4 bytes), topic, `min` or `max`, "
        "queue id (4 bytes) |\n"
        "| dispatched end | the key of the bound `max` for the topic CHECKPOINT_TOPIC and the "
        "queue id 0 |",
    ),
    (
        "State table entry (3.x)",
        (queue_entry.STATE_LAYOUT,),
        "The redo log of 3.x is a consume queue: each of its entries describes one message of a "
        "transaction\n([dialect-3.1.md](dialect-3.1.md)). The tags code is -1 for a PREPARED "
        "message. For a COMMIT or ROLLBACK message,\nthe tags code is the physical offset of the "
        "PREPARED frame.",
    ),
    (
        "Index file",
        (index.HEADER, index.SLOT, index.ENTRY),
        "The file has the header, then the slots, then the entries. Entry "
        "numbers begin with 0, but entry 0 is not used.",
    ),
    (
        "Timer wheel (5.x)",
        (timer.SLOT, timer.ENTRY, timer.BLANK, timer.CHECK),
        "`timerwheel` has 1,209,600 slots. A file of `timerlog/` has entries, then a blank if the "
        "next entry does not fit.\n`config/timercheck` has 4,096 bytes: the 56 bytes of the table, "
        "then zeros.",
    ),
    (
        "Checkpoint",
        (checkpoint.LAYOUT, checkpoint.OFFSETS),
        "The file has 4,096 bytes: the 24 bytes of the first table, the 24 bytes of the second "
        "table, then zeros.\nIn a file of RocketMQ 4.9, the offsets of the second table are 0.",
    ),
    (
        "Batch wire form, each message",
        (batch.HEAD,),
        "After this head, the body, PROPERTIESLEN (2 bytes) and the properties follow.",
    ),
)


def formats() -> str:
    """Return the text of docs/formats.md."""
    parts = [
        "# File formats",
        "This page lists the fields of a store's files, and the columns of DataFrames. "
        "All numbers are big-endian.",
    ]
    for title, layouts, text in FORMATS:
        if title:
            parts.append(f"## {title}")
        for layout in layouts:
            parts += [f"**{layout.name}**, {layout.size} bytes", layout.markdown()]
        if text:
            parts.append(text)
    parts += ["## Columns of DataFrames, Arrow and Parquet", schema.markdown()]
    return "\n\n".join(parts) + "\n"


def verify() -> str:
    """Return docs/verify.md with a new table of finding kinds."""
    text = (DOCS / "verify.md").read_text("utf-8")
    before, rest = text.split("<!-- kinds -->\n", 1)
    _, after = rest.split("<!-- end -->", 1)
    return f"{before}<!-- kinds -->\n{findings.markdown()}\n<!-- end -->{after}"


def compatibility_page() -> str:
    """Return docs/compatibility.md with new tables of results."""
    text = (DOCS / "compatibility.md").read_text("utf-8")
    before, rest = text.split("<!-- results -->\n", 1)
    _, after = rest.split("<!-- end -->", 1)
    return f"{before}<!-- results -->\n{compatibility.results()}\n<!-- end -->{after}"


def broker() -> str:
    """Return docs/broker-requests.md with a new table of requests."""
    text = (DOCS / "broker-requests.md").read_text("utf-8")
    before, rest = text.split("<!-- requests -->\n", 1)
    _, after = rest.split("<!-- end -->", 1)
    return f"{before}<!-- requests -->\n{remoting_codes.markdown()}\n<!-- end -->{after}"


PAGES = {
    "broker-requests.md": broker,
    "compatibility.md": compatibility_page,
    "formats.md": formats,
    "verify.md": verify,
}


def main() -> None:
    """Write all pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), "utf-8")


if __name__ == "__main__":
    main()
