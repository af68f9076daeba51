"""A walk that goes ahead in a thread of its own: the kernels let go of the interpreter's lock."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

_MOST_AHEAD: Final = 4
_POLL_SECONDS: Final = 0.1


class _End:
    """What the thread says last.

    Attributes:
        error: what ended it, None where it came to the end.
    """

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items in the same order, made while the ones before are worked on.

    Whoever stops early, by an exception too, has the thread end.
    """
    waiting: queue.Queue[T | _End] = queue.Queue(_MOST_AHEAD)
    is_over = threading.Event()

    def put(item: T | _End) -> None:
        while not is_over.is_set():
            try:
                waiting.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return

    def work() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                put(item)
                if is_over.is_set():
                    break
        except BaseException as raised:
            error = raised
        put(_End(error))

    thread = threading.Thread(target=work, name="verify-walk", daemon=True)
    thread.start()
    try:
        while not isinstance(item := waiting.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        is_over.set()
        thread.join()
