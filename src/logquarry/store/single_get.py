"""Gets messages from a store that is open for writing.

The module is compiled at the installation if possible (``hatch_build.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from logquarry import arguments
from logquarry.format.properties import parse_tags
from logquarry.read.get_kernel import KernelGet
from logquarry.read.log_queues import QueueKey, empty_queue
from logquarry.store.call_counts import CallCounter
from logquarry.store.log_reads import get_arguments

if TYPE_CHECKING:
    from logquarry.disk.service import Health
    from logquarry.read.get_message import GetResult
    from logquarry.read.queue import Queue

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

_monotonic = time.monotonic
_LEAST, _MOST, _MOST_COUNT = arguments.LONG_MIN, arguments.LONG_MAX, arguments.INT_MAX


class SingleGet:
    """The part of :class:`~logquarry.store.reader.LiveStore` that gets messages of a queue."""

    _live_queues: Mapping[QueueKey, Queue]
    _health: Health
    _counter: CallCounter
    _kernel: KernelGet | None

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """See :meth:`~logquarry.store.reads.StoreReads.get`."""
        began = exact_ns() if cython.compiled else _monotonic()
        # Only the subclass has the attributes that are read through `store`.
        store: Any = self
        if not (type(queue_id) is int and type(offset) is int and type(max_count) is int):
            topic, queue_id, offset, max_count, tag = get_arguments(
                topic, queue_id, offset, max_count, tag
            )
        wanted = None
        if tag is not None:
            wanted = parse_tags(arguments.text(tag, "tag"))
        queue: Queue | None = None
        if type(topic) is str:
            queue = self._live_queues.get((topic, queue_id))
        if queue is None or self._health.is_gone:
            queue = store.queue(topic, queue_id) or empty_queue(topic, queue_id)
        result = None
        if _LEAST <= offset <= _MOST and 0 <= max_count <= _MOST_COUNT:
            kernel = self._kernel
            if kernel is None:
                kernel = self._kernel = store._getter.kernel
            result = kernel.get(queue, offset, max_count, wanted)
        if result is None:
            store._require_open()
            get_arguments(topic, queue_id, offset, max_count, tag)
            result = store._getter.reference(queue, offset, max_count, wanted)
        took = (exact_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        count = len(cython.cast(tuple, result)[1] if cython.compiled else result.messages)
        CallCounter.got(self._counter, count, took)
        return result
