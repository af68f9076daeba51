"""Reads the bytes of a store's files.

:class:`OpenFiles` reads any files, and keeps the most recently read files open. :class:`LogBytes`
maps the log's files, finds the end of the data, and searches for frames.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from logquarry.errors import StoreNotFound, reason_of
from logquarry.format.arrays import BLANK, NEED_MORE, REACHED_STOP
from logquarry.format.frame import BLANK as BLANK_LAYOUT
from logquarry.format.frame import ENTRY_HEAD, FIXED_SIZE_V1, has_entry_head_reference
from logquarry.log import codec
from logquarry.log.filesystem import FileView, GoneFile, unreadable_file
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import Unreadable, first_unreadable
from logquarry.log.store_files import StoreFile

_NO_BYTES: Final = memoryview(b"")

MOST_OPEN: Final = 128
"""Maximum number of open files. A broker has many queue files."""


class OpenFiles:
    """Reads parts of files, and keeps the most recently used files open.

    Returned bytes stay valid, even after the file is closed or deleted. Bytes that the disk does
    not deliver are :data:`~logquarry.log.readable.FILL`.
    """

    def __init__(self, layout: StoreLayout, *, is_strict: bool = False) -> None:
        self.is_strict = is_strict
        self._layout = layout
        self._open: OrderedDict[str, FileView] = OrderedDict()

    def read(self, path: str, position: int, length: int) -> memoryview:
        """Read ``length`` bytes; fewer if the file ends earlier, and none if it was deleted.

        Raises StoreNotFound if the file exists but cannot be read. With ``is_strict``, raises
        UnreadableFile if the disk does not deliver the bytes.
        """
        data = self.read_from(path, position, length)[:length]
        view = self._open.get(path)
        if self.is_strict and view is not None and view.unreadable:
            found = first_unreadable(view.unreadable, position, len(data))
            if found is not None:
                raise unreadable_file(view, found)
        return data

    def read_from(self, path: str, position: int, length: int) -> memoryview:
        """Read at least ``length`` bytes; fewer if the file ends earlier, and none if it was
        deleted, or if ``position`` is negative.

        Raises StoreNotFound if the file exists but cannot be read.
        """
        view = self.view(path)
        return _NO_BYTES if view is None or position < 0 else view.window(position, length)

    def view(self, path: str) -> FileView | None:
        """Open the whole file; None if it was deleted. Raises StoreNotFound if it cannot be
        read.
        """
        view = self._open.get(path)
        if view is None:
            try:
                view = self._open[path] = self._layout.open_file(path)
            except FileNotFoundError:
                return None
            except OSError as error:
                full = self._layout.filesystem.full_path(path)
                raise StoreNotFound(f"{full}: cannot be read: {reason_of(error)}") from error
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(path)
        return view

    def window(self, path: str, position: int, length: int) -> tuple[int, memoryview]:
        """Return the readable bytes around a range, and the position at which they start."""
        view = self.view(path)
        if view is None or position < 0:
            return position, _NO_BYTES
        data = view.window(position, length)
        if not view.is_mapped or first_unreadable(view.unreadable, position, length):
            return position, data
        start = view.good_start(position)
        return start, view.window(start, position - start + length)

    def fault(self, path: str, position: int, length: int) -> Unreadable | None:
        """Return the first unreadable range that overlaps ``length`` bytes from ``position`` on;
        None if earlier reads found no such range.
        """
        view = self._open.get(path)
        return None if view is None else first_unreadable(view.unreadable, position, length)

    def reaches(self, path: str, end: int) -> bool:
        """Whether an open file still has all bytes before a position."""
        view = self._open.get(path)
        return view is None or view.reaches(end)

    def forget(self, path: str) -> None:
        """Reopen a file at its next read, because the file has grown or was replaced."""
        self._open.pop(path, None)

    def close(self) -> None:
        """Close all files. The next read opens a file again."""
        self._open.clear()


_SEARCH_BYTES = 1 << 20


class LogBytes:
    """Reads the files of one commit log. ``batch_bytes``: approximate size of a search window."""

    def __init__(self, layout: StoreLayout, *, check_crc: bool, batch_bytes: int) -> None:
        self.layout = layout
        self.files = layout.commit_log
        self.check_crc = check_crc
        self.batch_bytes = max(1, batch_bytes)
        self._open: tuple[StoreFile, FileView] | None = None

    def is_boundary(self, offset: int) -> bool:
        """Whether a physical offset is the start of a file, or of a gap between two files."""
        file = self.files.at(offset)
        if file is not None:
            return file.base == offset
        return self.files.at(offset - 1) is not None

    def data_end(self, start: int, stop: int | None = None) -> int:
        """Return the physical offset after the last byte that is not 0. The search covers the bytes
        from ``start`` to ``stop`` (None: the end of the log's last file). The result is ``start``
        if all these bytes are 0.
        """
        last, stop = start, self.files.end if stop is None else stop
        for file in self.files.files:
            if file.base + self.files.file_size <= start:
                continue
            if file.base >= stop:
                break
            at = max(0, start - file.base)
            end_at = min(self.size(file), self.files.file_size, stop - file.base)
            view = self.view(file)
            at = view.next_data(at)
            while at < end_at:
                # Search for the next data before the window is read. _find_in explains why.
                later = view.next_data(at + _SEARCH_BYTES)
                window = self.window_of(file, at, _SEARCH_BYTES)
                piece = min(window.length, end_at - at, _SEARCH_BYTES)
                end = codec.last_nonzero(window, 0, piece)
                if end:
                    last = max(last, file.base + at + end)
                at = later if piece == _SEARCH_BYTES else view.next_data(at + piece)
        return last

    def view(self, file: StoreFile) -> FileView:
        """Open a whole file for reading. The view is empty if the file was deleted."""
        if self._open is None or self._open[0] is not file:
            # Only one file stays open. The map of an earlier file exists until its windows are
            # released.
            try:
                view = self.layout.open_file(file.path)
            except FileNotFoundError:
                # A live broker's retention may delete the file after the listing.
                view = GoneFile(self.layout.filesystem.full_path(file.path))
            self._open = file, view
        return self._open[1]

    def forget_copies(self, file: StoreFile) -> None:
        """Forget the bytes of a remote file that the view or fsspec has fetched. A map always shows
        the present bytes.
        """
        if not self.view(file).is_mapped:
            self._open = None

    def size(self, file: StoreFile) -> int:
        """Return the number of bytes that a file still has; 0 if it was deleted since the
        listing.
        """
        return min(file.size, self.view(file).size) if file.size else 0

    def window_of(self, file: StoreFile, at: int, length: int) -> codec.Window:
        """Return a window of ``length`` bytes or more from a position in a file, or of all bytes up
        to the file's end.
        """
        data = self.view(file).window(at, length)
        # Drop bytes after the file's regular size, which are not part of the log.
        data = data[: max(0, self.files.file_size - at)]
        end = self.files.file_size - at
        return codec.Window.of(data, file.base + at, end, has_heads=self.files.has_heads)

    def fault_in(self, file: StoreFile, at: int, length: int) -> Unreadable | None:
        """Return the first unreadable range that overlaps a range of a file."""
        view = self.view(file)
        if not view.unreadable:
            return None
        return view.fault(at, length)

    def frame_fault(self, file: StoreFile, at: int) -> Unreadable | None:
        """Return the first unreadable range in the frame, or in the blank, at a position."""
        view = self.view(file)
        # Call view.fault even if no unreadable range is known, because the call also detects a
        # truncated file.
        is_noted = view.is_mapped or bool(view.unreadable)
        head = view.fault(at, FIXED_SIZE_V1) if is_noted else None
        if head is not None or not view.unreadable:
            return head
        size, _ = BLANK_LAYOUT.struct.unpack_from(
            bytes(view.window(at, BLANK_LAYOUT.size)[: BLANK_LAYOUT.size]).ljust(BLANK_LAYOUT.size)
        )
        return view.fault(at, size) if 0 < size <= self.files.file_size - at else None

    def whole_frame(self, file: StoreFile, at: int) -> tuple[codec.Window, int]:
        """Return a window that contains the whole frame at ``at``, and the code that
        :func:`codec.walk` returns for this frame.

        In a DLedger log, each frame has a head of 48 bytes before it. If ``at`` is the start of
        such a head, the window begins with the head.
        """
        window = self.window_of(file, at, ENTRY_HEAD.size + FIXED_SIZE_V1)
        data, left, skip = window.data.data, window.end, 0
        if window.has_heads and has_entry_head_reference(data, 0, base=window.base, left=left):
            skip = ENTRY_HEAD.size
        size = 0
        if window.length >= skip + BLANK_LAYOUT.size:
            size, _ = BLANK_LAYOUT.struct.unpack_from(data, skip)
        window = self.window_of(file, at, max(FIXED_SIZE_V1, min(skip + size, left)))
        rows = codec.empty_rows(1)
        _, _, code = codec.walk(window, 0, 1 + skip, rows, check_crc=self.check_crc)
        return window, code

    def find(self, start: int, limit: int) -> int | None:
        """Find the first sound frame in a range, or the first file that begins with a blank.

        Return the physical offset of the first of the two; None if the range has neither.

        A blank at the start of the log's first file is ignored.
        """
        for index, file in enumerate(self.files.files):
            if file.base + self.files.file_size <= start or self.size(file) == 0:
                continue
            if file.base >= limit:
                break
            at = max(0, start - file.base)
            if at == 0 and index and self.whole_frame(file, 0)[1] == BLANK:
                return file.base
            found = self._find_in(file, at, min(limit - file.base, self.size(file)))
            if found is not None:
                return file.base + found
        return None

    def _find_in(self, file: StoreFile, at: int, stop: int) -> int | None:
        view = self.view(file)
        data: int | None = None
        while at < stop:
            # The search skips holes of a sparse file. But a frame may begin in a hole, because its
            # first bytes may be 0, so the search begins some bytes before the data.
            data = view.next_data(at) if data is None else data
            if data >= stop:
                return None
            at = max(at, data - FIXED_SIZE_V1)
            length = min(stop - at + FIXED_SIZE_V1, self.batch_bytes)
            if view.is_mapped:
                length = min(length, _SEARCH_BYTES + FIXED_SIZE_V1)
            # Search in small pieces. After each piece, the next hole can be skipped. Find the end
            # of this hole before the window is read: the window extends into the next piece, and on
            # a tmpfs, reading a map turns holes into data.
            piece = min(stop - at, _SEARCH_BYTES)
            later = view.next_data(at + piece)
            window = self.window_of(file, at, length)
            place, code = codec.find_frame(window, 0, piece, check_crc=self.check_crc)
            if code == REACHED_STOP:
                return at + place
            if code != NEED_MORE:
                at, data = at + piece, later
                continue
            data = None
            if window.length == self.view(file).size - at:
                # The window reaches the end of the file, so no larger window is possible. So the
                # frame is incomplete, and the search continues after the frame's first byte.
                at += place + 1
                continue
            if place == 0:
                window, code = self.whole_frame(file, at)
                if code == REACHED_STOP:
                    return at
                at += 1
            else:
                at += place
        return None
