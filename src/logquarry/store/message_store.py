"""The store that users open: ``MessageStore.open`` returns a reader or a writer.

::

    StoreReads (reads.py)  <-  BaseReader (reader.py)  <-  StoreReader
               ^           <-  BaseWriter (writer.py)  <-  StoreWriter
               '- MessageStore: open(); also a base of StoreReader and StoreWriter
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, SupportsIndex, overload

from logquarry import arguments
from logquarry.arguments import Clock
from logquarry.config import StoreConfig
from logquarry.errors import UsageError, WrongType
from logquarry.store.reader import BaseReader, ReadOnlyStore
from logquarry.store.reads import StoreReads
from logquarry.store.writer import BaseWriter

if TYPE_CHECKING:
    from logquarry.store.stats import StoreStats

Mode = Literal["r", "rw"]


class MessageStore(StoreReads):
    """One store directory (``DefaultMessageStore``), open for reading or for writing.

    Open a store with :meth:`open`, and use the store as a context manager. Readers and writers both
    have the methods of this class. Only a :class:`StoreWriter` has methods that write.

    Attributes:
        layout: the store's files.
        config: the store's settings.
        broker: name of the store; the attribute ``broker`` of each message that is read has this
            value.
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        """Refuse ``MessageStore(path)``; Python's error would list the abstract methods."""
        if cls is MessageStore:
            raise UsageError("open a store with MessageStore.open(path)")
        return super().__new__(cls)

    @overload
    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        mode: Literal["r"] = "r",
        config: StoreConfig | None = None,
        clock: Clock | None = None,
        broker: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> StoreReader: ...
    @overload
    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        mode: Literal["rw"],
        config: StoreConfig | None = None,
        clock: Clock | None = None,
        broker: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        accept_loss: int | None = None,
    ) -> StoreWriter: ...
    @overload
    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        mode: Mode,
        config: StoreConfig | None = None,
        clock: Clock | None = None,
        broker: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        accept_loss: int | None = None,
    ) -> MessageStore: ...
    @staticmethod
    def open(
        path: str | os.PathLike[str],
        *,
        mode: Mode = "r",
        config: StoreConfig | None = None,
        clock: Clock | None = None,
        broker: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        accept_loss: int | None = None,
    ) -> MessageStore:
        """Open the store at a path or URL.

        Args:
            path: the folder that holds ``commitlog/``.
            mode: with ``"r"``, the store can only be read. With ``"rw"``, it can also be written:
                the call locks the store, and creates a store if the folder is empty or missing.
            config: settings that cannot be inferred from the files, or that you want to change.
            clock: function that returns the current time in milliseconds; a writer stores it as the
                messages' store time. If the function returns no integer, or a negative one, the
                call that needs the time raises UsageError.
            broker: the value of the attribute ``broker`` of each message (default: the folder's
                name).
            storage_options: options of the file system, if ``path`` is a URL.
            accept_loss: if opening with ``"rw"`` needs a recovery, the number of message bytes that
                the recovery may lose. Without this argument, the opening refuses a recovery
                that would lose more than a small share of the messages.

        Raises:
            StoreNotFound: if there is no store at ``path``, or, with ``"rw"``, if the folder
                contains other files.
            UnsupportedStore: if the log is not in ``commitlog/``; with ``"rw"``, also if the store
                uses an unsupported feature, and writing would harm the store.
            StoreUnavailable: if another process has the store open for writing, or if the store
                needs a recovery that this method cannot do.
            LossRefused: if the recovery would lose more than is allowed (``accept_loss``).
        """
        arguments.choice(mode, "mode", ("r", "rw"))
        broker = arguments.optional(arguments.text, broker, "broker")
        clock = arguments.optional(arguments.clock, clock, "clock")
        arguments.storage_options(storage_options)
        if mode == "rw":
            return StoreWriter.start(
                path, config=config, clock=clock, broker=broker, accept_loss=accept_loss
            )
        return StoreReader.start(
            path, config=config, broker=broker, storage_options=storage_options
        )

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the store's contents, and counts of calls of this object (:class:`StoreStats`)."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise WrongType(
            f"{self.root}: an open store cannot be pickled or copied. Pass its path instead, and "
            f"open the store there: MessageStore.open({self.root!r})"
        )


class StoreReader(BaseReader, MessageStore):
    """A store that is open for reading."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _ONLY_OF_WRITERS]


class StoreWriter(BaseWriter, MessageStore):
    """A store that is open for reading and writing."""


class _NeedsWriter:
    """Replaces, in a reader, a method that only writers have.

    Access to the method raises an error that explains how to open the store for writing.
    """

    def __get__(self, store: StoreReader | None, kind: type[StoreReader]) -> _NeedsWriter:
        if store is None:
            return self
        raise ReadOnlyStore.of(store.root)


# A method __getattr__ could replace this loop, but would make each access to a reader's attribute
# slower.
_ONLY_OF_WRITERS = frozenset(
    name for name in set(dir(StoreWriter)) - set(dir(StoreReader)) if not name.startswith("_")
)
for _name in _ONLY_OF_WRITERS:
    setattr(StoreReader, _name, _NeedsWriter())
