"""Writes the tables of the docs from those in the code: ``python -m tools.docs_tables``."""

from __future__ import annotations

from pathlib import Path

from logquarry.format import batch, checkpoint, frame, index, queue_entry, state_table
from logquarry.format.fields import Layout
from logquarry.log import schema
from logquarry.repair.verify import findings

DOCS = Path(__file__).parent.parent / "docs"

_FORMATS: tuple[tuple[str, tuple[Layout, ...], str], ...] = (
    (
        "Message frame",
        (frame.HEAD,),
        "BORNHOST follows: address and port, 8 bytes, or 20 with bit 0x10 of SYSFLAG. Then:",
    ),
    (
        "",
        (frame.STORE_TIME,),
        "STOREHOSTADDRESS follows: 8 bytes, or 20 with bit 0x20 of SYSFLAG. Then:",
    ),
    (
        "",
        (frame.TAIL,),
        "The body, TOPICLEN (1 byte, signed; 2 with magic daa320ab), the topic, PROPERTIESLEN "
        "(2 bytes, signed) and the properties follow. With two IPv4 hosts 91 bytes are fixed.",
    ),
    ("Blank", (frame.BLANK,), "It ends a file; the rest of the file may hold anything."),
    ("Consume queue unit", (queue_entry.LAYOUT,), ""),
    (
        "State table unit (3.x)",
        (state_table.LAYOUT,),
        "The redo log of 3.x has units of a consume queue: the tags code is -1 for PREPARED, and "
        "for COMMIT and ROLLBACK the physical offset of the PREPARED frame "
        "([dialect-3.1.md](dialect-3.1.md)).",
    ),
    (
        "Index file",
        (index.HEADER, index.SLOT, index.ENTRY),
        "The header, then the slots, then the entries. Entries count from 1; entry 0 is not used.",
    ),
    ("Checkpoint", (checkpoint.LAYOUT,), "At the start of a page of 4,096 bytes."),
    (
        "Batch wire form, each message",
        (batch.HEAD,),
        "The body, PROPERTIESLEN (2 bytes) and the properties follow.",
    ),
)


def formats() -> str:
    """docs/formats.md."""
    parts = ["# The bytes", "Everything is big-endian."]
    for title, layouts, text in _FORMATS:
        if title:
            parts.append(f"## {title}")
        for layout in layouts:
            parts += [f"**{layout.name}**, {layout.size} bytes", layout.markdown()]
        if text:
            parts.append(text)
    parts += ["## Columns of DataFrames, Arrow and Parquet", schema.markdown()]
    return "\n\n".join(parts) + "\n"


def verify() -> str:
    """docs/verify.md with its table of kinds made anew."""
    text = (DOCS / "verify.md").read_text("utf-8")
    before, rest = text.split("<!-- kinds -->\n", 1)
    _, after = rest.split("<!-- end -->", 1)
    return f"{before}<!-- kinds -->\n{findings.markdown()}\n<!-- end -->{after}"


PAGES = {"formats.md": formats, "verify.md": verify}


def main() -> None:
    """Write all pages."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), "utf-8")


if __name__ == "__main__":
    main()
