"""Exports into Delta and Iceberg tables without Spark: tasks run in this process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import logquarry as lq
from logquarry.spark.lakehouse.advance import TableSummary, Work
from logquarry.spark.lakehouse.export import TableExport, delta_export, iceberg_export
from logquarry.spark.lakehouse.write import TableResult
from logquarry.spark.tasks import ReadTask

KINDS = ("delta", "iceberg")
SMALL = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 14,
    mapped_file_size_consume_queue=2_000,
    max_hash_slot_num=100,
    max_index_num=400,
)


def put(store: Path, *bodies: bytes, topic: str = "orders", **fields: Any) -> list[int]:
    """Put bodies into queue 0 of a small store, and return their physical offsets."""
    with lq.MessageStore.open(store, config=SMALL, mode="rw") as opened:
        made = [lq.Message(topic=topic, body=body, queue_id=0, **fields) for body in bodies]
        results = [opened.put(message) for message in made]
    assert all(result.ok for result in results)
    return [result.physical_offset for result in results]


def numbers(first: int, stop: int) -> list[bytes]:
    """Bodies with the numbers of a range."""
    return [f"body {number}".encode() for number in range(first, stop)]


def run_here(tasks: Sequence[ReadTask], work: Work) -> list[TableResult]:
    """Run each task in turn; task and result are pickled, as between Spark's processes."""
    found = []
    for task in tasks:
        own_work, own_task = pickle.loads(pickle.dumps((work, task)))
        found.append(pickle.loads(pickle.dumps(own_work(own_task))))
    return found


class Lake:
    """One table, for repeated exports.

    Args:
        kind: delta or iceberg.
        dest: where.
    """

    def __init__(self, kind: str, dest: Path) -> None:
        self.kind = kind
        self.dest = dest

    def prepared(
        self,
        stores: Path | Sequence[Path],
        options: Mapping[str, str] | Any = None,
        **more: Any,
    ) -> TableExport:
        make = delta_export if self.kind == "delta" else iceberg_export
        paths = [stores] if isinstance(stores, Path) else list(stores)
        return make(paths, self.dest, options, **more)

    def export(
        self, stores: Path | Sequence[Path], options: Any = None, **more: Any
    ) -> TableSummary:
        return self.prepared(stores, options, **more).run_with(run_here)

    def table(self, *, dead: bool = False) -> pa.Table:
        """The rows that a reader of the format gets."""
        if self.kind == "delta":
            from deltalake import DeltaTable

            place = f"{self.dest}_dead_letters" if dead else self.dest
            return DeltaTable(place).to_pyarrow_table()
        with self.catalog() as catalog:
            return catalog.load_table(_name(dead)).scan().to_arrow()

    @contextmanager
    def catalog(self) -> Iterator[Any]:
        """The catalog of an Iceberg table."""
        # Imported late: SQLAlchemy would cost each process that collects tests a second.
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("logquarry", type="sql", uri=f"sqlite:///{self.dest}/catalog.db")
        try:
            yield catalog
        finally:
            catalog.close()

    @contextmanager
    def iceberg(self) -> Iterator[Any]:
        """The Iceberg table with the messages, as its catalog has it now."""
        with self.catalog() as catalog:
            yield catalog.load_table(_name(dead=False))

    def rows(self, *names: str, dead: bool = False) -> list[tuple[Any, ...]]:
        """Some columns, in physical order by broker."""
        keys = ["broker", "physical_offset"]
        wanted = list(names) or [*keys, "body"]
        table = self.table(dead=dead).select(list(dict.fromkeys([*keys, *wanted])))
        table = table.sort_by([(key, "ascending") for key in keys]).select(wanted)
        return [tuple(row[name] for name in wanted) for row in table.to_pylist()]

    def bodies(self) -> list[bytes]:
        """The bodies in physical order by broker."""
        return [body for (body,) in self.rows("body")]

    def parquet_files(self) -> set[str]:
        """All data files on the disk, also those that the table does not name."""
        places = [self.dest, Path(f"{self.dest}_dead_letters")]
        return {
            str(p)
            for place in places
            for p in place.rglob("*.parquet")
            if "_delta_log" not in p.parts
        }

    def known_files(self) -> set[str]:
        """The data files that the tables name."""
        found: set[str] = set()
        for dead in (False, True):
            if self.kind == "delta":
                from deltalake import DeltaTable

                place = Path(f"{self.dest}_dead_letters") if dead else self.dest
                if DeltaTable.is_deltatable(str(place)):
                    found |= {u.removeprefix("file://") for u in DeltaTable(place).file_uris()}
                continue
            with self.catalog() as catalog:
                if catalog.table_exists(_name(dead)):
                    plan = catalog.load_table(_name(dead)).scan().plan_files()
                    found |= {task.file.file_path.removeprefix("file://") for task in plan}
        return found


def _name(dead: bool) -> tuple[str, str]:
    return "logquarry", "messages_dead_letters" if dead else "messages"
