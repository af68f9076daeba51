"""What a task of the source hands to Spark: batches of exactly the schema that Spark was told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from logquarry.spark.errors import told_plainly
from logquarry.spark.worker import let_hang_up, settle

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from logquarry.spark.tasks import ReadTask

logger = logging.getLogger(__name__)


def task_rows(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    """The messages of a task, in a worker.

    Raises:
        CorruptFrame: on damage, unless it is to be skipped; then it is told on stderr.
    """
    settle()
    # Spark hangs up once it has all the rows it needs (a limit, show()).
    let_hang_up()
    with told_plainly():
        yield from _batches(task, struct)


def _batches(task: ReadTask, struct: StructType) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.pandas.types import to_arrow_schema

    from logquarry.scan.batches import DamageLog
    from logquarry.spark.tasks import read_batches

    wanted = to_arrow_schema(struct, timezone="UTC")
    damage = DamageLog()
    told = 0
    for batch in read_batches(task, damage):
        yield _with_schema(batch, wanted)
        told = _tell(damage, told)
    _tell(damage, told)


def _with_schema(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """The same arrays as a schema calls them, which also says what may be null."""
    import pyarrow as pa

    arrays = [
        array if array.type.equals(field.type) else _retyped(array, field.type)
        for array, field in zip(batch.columns, wanted, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _retyped(array: pa.Array, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    return _as_map(array, kind) if pa.types.is_map(kind) else array.cast(kind)


def _as_map(array: pa.MapArray, kind: pa.MapType) -> pa.Array:
    """A map of which the type says otherwise whether values may be null.

    A cast would do; it takes longer than all else about such a batch.
    """
    import pyarrow as pa

    entries = pa.struct([kind.key_field, kind.item_field])
    pairs = pa.Array.from_buffers(entries, len(array.keys), [None], 0, 0, [array.keys, array.items])
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], array.null_count, array.offset, [pairs]
    )


def _tell(damage: Any, told: int) -> int:
    for span in damage.spans[told:]:
        logger.warning(
            "%s: at offset %d: %s: %s (%d bytes passed over)",
            span.path,
            span.offset,
            span.kind,
            span.reason,
            span.length,
        )
    return len(damage.spans)
