"""Reading an open store in bulk: what users call; :mod:`.reading` does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from logquarry.log.layout import StoreLayout
from logquarry.message import StoredMessage

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.log.batches import DamageLog, OnDamage


class BulkReads(ABC):
    """The messages of a store, many at a time.

    Attributes:
        broker: name of the store, which messages carry.
    """

    broker: str

    @abstractmethod
    def _require_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""

    @abstractmethod
    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        """The files to read, and the physical offset that is just too large, if any."""

    def scan(
        self,
        topic: str | Iterable[str] | None = None,
        queue_id: int | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        since: int | None = None,
        until: int | None = None,
        on_damage: OnDamage = "default",
        damage: DamageLog | None = None,
    ) -> Iterator[StoredMessage]:
        """Messages in physical order, each decoded when it is looked at.

        Args:
            topic: the topics' names (default: all messages of the log, also those that are in no
                queue).
            queue_id: a queue's number.
            tags: tags as a consumer gives them: ``paid || sent``.
            keys: words of KEYS, or UNIQ_KEYs, one of which a message must have.
            since: least store time in milliseconds.
            until: store time in milliseconds that is just too late.
            on_damage: ``default`` raises but for a torn tail; ``stop``, ``skip``, ``fail``: see
                :data:`logquarry.log.batches.OnDamage`.
            damage: gets what was damaged.

        Raises:
            CorruptFrame: on damage, as ``on_damage`` says.
        """
        self._require_open()
        from logquarry.read import bulk

        wanted = bulk.message_filter(topic, queue_id, tags, keys, since, until)
        layout, stop = self._bulk_layout()
        return bulk.messages(layout, self.broker, wanted, on_damage, damage, stop_offset=stop)

    def to_arrow(
        self,
        topics: str | Iterable[str] | None = None,
        queue_id: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        since: int | None = None,
        until: int | None = None,
        on_damage: OnDamage = "default",
        damage: DamageLog | None = None,
        decompress: bool = False,
    ) -> pa.RecordBatchReader:
        """The same as :meth:`scan`, as a stream of Arrow record batches.

        Args:
            topics: the topics' names.
            queue_id: a queue's number.
            columns: which columns, in which order (default: all of
                :data:`logquarry.log.schema.COLUMNS`). What is left out is not decoded; bodies
                are compared with their CRC only where ``body`` is among them.
            tags: see :meth:`scan`, as for the others.
            keys: words of keys.
            since: least store time in milliseconds.
            until: store time that is just too late.
            on_damage: what to do about damage.
            damage: gets what was damaged.
            decompress: whether bodies are decompressed.

        Raises:
            CorruptFrame: while batches are read, as ``on_damage`` says.
        """
        self._require_open()
        from logquarry.read import bulk

        layout, stop = self._bulk_layout()
        return bulk.arrow_reader(
            layout,
            self.broker,
            bulk.message_filter(topics, queue_id, tags, keys, since, until),
            columns=columns,
            on_damage=on_damage,
            damage=damage,
            decompress=decompress,
            stop_offset=stop,
        )
