"""Copies damaged bytes to a folder for later inspection; the read continues (onDamage=quarantine).

::

    FOLDER/BROKER/00000000000000078237.bin    the damaged bytes, without the zeros at their end
    FOLDER/BROKER/00000000000000078237.json   file, offset, length, kind and reason

A file name depends only on broker and physical offset, so a second read finds existing copies.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import quote

from logquarry.errors import StoreUnavailable
from logquarry.log.batches import BAD_COMPRESSION, BadBodies
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import NAME_DIGITS
from logquarry.log.walk import DamagedSpan
from logquarry.spark.output import OutputFolder
from logquarry.spark.summary import damage_as_dict

_PIECE: Final = 8 << 20


class Quarantine:
    """The copies of one store's damage."""

    def __init__(self, folder: OutputFolder, broker: str) -> None:
        self._folder = folder
        self._broker = broker

    def keep(self, layout: StoreLayout, span: DamagedSpan) -> None:
        """Copy a damaged span, unless the folder has an earlier copy of at least this length."""
        # A broker's name can contain slashes.
        name = f"{quote(self._broker, safe=' ')}/{span.offset:0{NAME_DIGITS}d}"
        try:
            self._keep(layout, span, name)
        except OSError as error:
            where = f"{self._folder.location}/{name}"
            raise StoreUnavailable(f"{where}: damage cannot be copied there: {error}") from error

    def of_bodies(self, layout: StoreLayout, report: BadBodies) -> Callable[[int, str], None]:
        """Make a callback for :attr:`Decoding.on_bad_body`, called if decompression fails.

        The copy has no bytes, because the read returns the message with its compressed body.
        """

        def keep(offset: int, reason: str) -> None:
            report(offset, reason)
            self.keep(
                layout, DamagedSpan(offset, 0, BAD_COMPRESSION, reason, layout.log_path(offset))
            )

        return keep

    def _keep(self, layout: StoreLayout, span: DamagedSpan, name: str) -> None:
        if self._kept_length(f"{name}.json") >= span.length:
            return
        document = {"broker": self._broker, **damage_as_dict(span)}
        # Each attempt of a task writes its own temporary file. The last attempt replaces other
        # copies.
        passing = f"{name}.{uuid.uuid4().hex}.tmp"
        self._folder.make(name.rpartition("/")[0])
        document["bytes"] = 0
        with self._folder.create(passing) as sink:
            for piece in _pieces(layout, span):
                sink.write(piece)
                document["bytes"] += len(piece)
        # A later read trusts the document, so its bytes must survive a power cut too.
        self._folder.sync(passing)
        self._folder.move(passing, f"{name}.bin")
        self._folder.write_json(f"{name}.json", document, by_way_of=passing)

    def _kept_length(self, path: str) -> int:
        try:
            document = self._folder.read_json(path)
        except ValueError:
            return -1
        length = document.get("length") if isinstance(document, dict) else None
        return length if isinstance(length, int) else -1


def _pieces(layout: StoreLayout, span: DamagedSpan) -> Iterator[bytes]:
    """Yield the remaining bytes of a damaged span, without the zeros at the end of the span."""
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
