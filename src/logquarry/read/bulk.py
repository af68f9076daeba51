"""``scan`` and ``to_arrow``: reads many messages in physical order, as objects or Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from typing import TYPE_CHECKING

from logquarry import arguments
from logquarry.arguments import optional
from logquarry.log import batches, schema
from logquarry.log.batches import DamageLog, OnDamage
from logquarry.log.columns import Decoding
from logquarry.log.filters import MessageFilter, names, tag_expression
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Run
from logquarry.read.selection import Selection, plan_read, read_in_order
from logquarry.read.store_sizes import require_log

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.stored_message import StoredMessage


def message_filter(
    topics: str | Iterable[str] | None,
    queue_id: int | None,
    tags: str | None,
    keys: str | Iterable[str] | None,
    since: int | str | date | None,
    until: int | str | date | None,
) -> MessageFilter:
    """Make a filter from the arguments of ``scan``: names, ``a || b``, times.

    Raises:
        UsageError: if an argument is invalid, a name is empty, or ``since`` is later than
            ``until``.
    """
    since_ms, until_ms = arguments.time_range(since, until)
    return MessageFilter(
        topics=names(optional(arguments.names, topics, "topics"), "topics"),
        queue_ids=None if queue_id is None else frozenset({arguments.int32(queue_id, "queue_id")}),
        tags=tag_expression(optional(arguments.text, tags, "tags")),
        keys=names(optional(arguments.names, keys, "keys"), "keys"),
        since_ms=since_ms,
        until_ms=until_ms,
    )


def runs(
    layout: StoreLayout,
    wanted: MessageFilter,
    on_damage: OnDamage,
    damage: DamageLog | None,
    *,
    check_crc: bool = True,
    stop_offset: int | None = None,
) -> Iterator[Run]:
    """The messages before ``stop_offset`` that may pass a filter, in physical order.

    Each message of an inner batch is a separate row, in an unwrapped window.
    """
    batches.check_policy(on_damage)
    if damage is not None:
        arguments.instance(damage, "damage", batches.DamageLog, "a DamageLog")
    require_log(layout)
    selection = Selection(wanted=wanted, stop_offset=stop_offset)
    plan = plan_read(layout, selection, skip_damage=on_damage == "skip")
    events = read_in_order(layout, plan, check_crc=check_crc)
    return batches.message_runs(events, on_damage, damage, limit=layout.config.decompress_limit)


def messages(
    layout: StoreLayout,
    broker: str,
    wanted: MessageFilter,
    on_damage: OnDamage = "default",
    damage: DamageLog | None = None,
    *,
    stop_offset: int | None = None,
) -> Iterator[StoredMessage]:
    """Messages that pass a filter, in physical order."""
    decoding = Decoding(broker=broker, delay_levels_ms=layout.delay_levels_ms)
    found = runs(layout, wanted, on_damage, damage, stop_offset=stop_offset)
    return batches.messages(found, decoding, wanted)


def arrow_reader(
    layout: StoreLayout,
    broker: str,
    wanted: MessageFilter,
    *,
    columns: Sequence[str] | None = None,
    on_damage: OnDamage = "default",
    damage: DamageLog | None = None,
    decompress: bool = False,
    stop_offset: int | None = None,
) -> pa.RecordBatchReader:
    """Messages that pass a filter, as record batches; each batch is read when you ask for it."""
    import pyarrow as pa

    arguments.flag(decompress, "decompress")
    chosen = schema.NAMES
    if columns is not None:
        chosen = schema.check_names(arguments.names(columns, "columns"))
    decoding = Decoding(
        columns=chosen,
        broker=broker,
        delay_levels_ms=layout.delay_levels_ms,
        decompress=decompress,
        decompress_limit=layout.config.decompress_limit,
        on_bad_body=batches.BadBodies(layout, on_damage, damage),
    )
    has_body = "body" in chosen
    found = runs(layout, wanted, on_damage, damage, check_crc=has_body, stop_offset=stop_offset)
    return pa.RecordBatchReader.from_batches(
        schema.arrow_schema(chosen), batches.record_batches(found, decoding, wanted)
    )
