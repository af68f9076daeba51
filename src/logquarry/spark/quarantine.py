"""Copies the damage that a read with ``onDamage=quarantine`` skips::

    FOLDER/BROKER/00000000000000078237.bin    the damaged bytes, without the zeros at their end
    FOLDER/BROKER/00000000000000078237.json   file, offset, length, kind and reason

A file name depends only on broker and physical offset, so a second read finds the copies that the
first read made.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Final
from urllib.parse import quote

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.log.batches import BAD_COMPRESSION, BadBodies
from logquarry.log.layout import StoreLayout
from logquarry.log.location import lies_in_store
from logquarry.log.store_files import NAME_DIGITS
from logquarry.log.walk import DamagedSpan
from logquarry.spark.options import ReadOptions
from logquarry.spark.output import OutputFolder

_PIECE: Final = 8 << 20


def check_quarantine(options: ReadOptions, stores: Mapping[str, str]) -> None:
    """Raise UsageError if the folder of the copies is inside a store.

    Args:
        stores: location of each store by the name of its broker.
    """
    folder = options.quarantine_path
    if folder is None:
        return
    places = [folder, *(f"{folder}/{_folder_of(broker)}" for broker in stores)]
    for location in stores.values():
        for place in places:
            if lies_in_store(place, location, options.config):
                raise UsageError(
                    f"quarantinePath: {place} lies in the store {location}, and copies of damage "
                    "there would count as files of the store: give a folder outside of it"
                )


def _folder_of(broker: str) -> str:
    # A broker's name can contain slashes.
    return quote(broker, safe=" ")


class Quarantine:
    """Copies the damaged bytes of one store."""

    def __init__(self, folder: OutputFolder, broker: str, layout: StoreLayout) -> None:
        self._folder = folder
        self._broker = broker
        self._layout = layout

    def keep(self, span: DamagedSpan) -> None:
        """Copy a damaged span, unless the folder has a copy of the same or a longer span."""
        name = f"{_folder_of(self._broker)}/{span.offset:0{NAME_DIGITS}d}"
        try:
            self._keep(span, name)
        except OSError as error:
            where = f"{self._folder.location}/{name}"
            raise StoreUnavailable(f"{where}: damage cannot be copied there: {error}") from error

    def of_bodies(self, report: BadBodies) -> Callable[[int, str], None]:
        """Make a callback for :attr:`Decoding.on_bad_body`, called if decompression fails.

        The quarantine then gets only the JSON file, without bytes, because the read returns the
        message with its compressed body.
        """

        def keep(offset: int, reason: str) -> None:
            report(offset, reason)
            path = self._layout.log_path(offset)
            self.keep(DamagedSpan(offset, 0, BAD_COMPRESSION, reason, path))

        return keep

    def _keep(self, span: DamagedSpan, name: str) -> None:
        if self._kept_length(f"{name}.json") >= span.length:
            return
        # Each attempt of a task writes its own temporary file. If several attempts copy the same
        # damage, the last copy replaces the others.
        passing = f"{name}.{uuid.uuid4().hex}.tmp"
        self._folder.make(name.rpartition("/")[0])
        size = 0
        with self._folder.create(passing) as sink:
            for piece in _pieces(self._layout, span):
                sink.write(piece)
                size += len(piece)
        # A later read does not copy the damage again if the JSON document exists. Sync the bytes
        # first, so that a power cut cannot keep the document and lose the bytes.
        self._folder.sync(passing)
        self._folder.move(passing, f"{name}.bin")
        document = {"broker": self._broker, **span.to_json(), "bytes": size}
        self._folder.write_json(f"{name}.json", document, by_way_of=passing)

    def _kept_length(self, path: str) -> int:
        try:
            document = self._folder.read_json(path)
        except ValueError:
            return -1
        length = document.get("length") if isinstance(document, dict) else None
        return length if isinstance(length, int) else -1


def _pieces(layout: StoreLayout, span: DamagedSpan) -> Iterator[bytes]:
    """Yield the damaged bytes in the file, without the zeros at the end of the damage."""
    file = layout.commit_log.at(span.offset)
    if file is None:
        return
    try:
        view = layout.open_file(file.path)
    except FileNotFoundError:
        return
    at, stop = span.offset - file.base, min(span.offset - file.base + span.length, view.size)
    zeros = 0
    while at < stop:
        length = min(_PIECE, stop - at)
        piece = bytes(view.window(at, length)[:length])
        data = piece.rstrip(b"\0")
        if data:
            while zeros:
                yield bytes(min(zeros, _PIECE))
                zeros -= min(zeros, _PIECE)
            yield data
        zeros += len(piece) - len(data)
        at += length
