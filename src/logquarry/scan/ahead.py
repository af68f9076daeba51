"""Work that goes on beside its use: kernels let go of the interpreter, two cores do both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar, cast

T = TypeVar("T")

_END: Final = object()


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The items in their order; each is made while the one before it is looked at.

    What making one raises comes here. Whoever stops early waits for the one that is being made.
    """
    source = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        coming = pool.submit(next, source, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, source, _END)
            yield cast(T, item)
