"""Second names for the log's files, so that none of them is lost with its first.

A Java store that is opened on a store in use is refused by the lock, but only after its recovery
has acted (reliability.md, rule 1): it lists the log's files, walks them to their end, and deletes
those behind it, among them the one that was made ahead and was empty when it looked. By the time
it deletes it, this writer may be writing to it, and have acknowledged what it wrote.

So each file that is written to has a hard link in ``.logquarry/names/``, beside the log's folder:

    STORE/commitlog/00000000000000065536   STORE/.logquarry/names/commitlog/00000000000000065536

A file whose first name is gone gets it back, the same file with all that is in it: at the next
check, at the end, or when the store is opened after a crash. A store that is closed in order has no
such links.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from logquarry.errors import StoreUnavailable
from logquarry.files.layout import SIDECAR
from logquarry.store.disk.disk import Disk

logger = logging.getLogger(__name__)

_NAMES: Final = "names"


class NameGuard:
    """The second names of the files of one log."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._change = threading.Lock()
        self._paths: tuple[Path, ...] = ()
        self._folders: set[Path] = set()

    def guard(self, path: Path) -> None:
        """Give a file its second name, in place of a file that had it.

        Where the file system knows no hard links the file stays as it is: a sync then tells when
        it has lost its name.
        """
        with self._change:
            with contextlib.suppress(OSError):
                self._drop(path)
            link = link_of(path)
            try:
                if link.parent not in self._folders:
                    self._disk.make_folders(link.parent)
                    self._folders.add(link.parent)
                self._disk.link(path, link)
            except FileNotFoundError:
                # Deleted in this moment: the caller looks whether it is there.
                return
            except OSError as error:
                logger.info("%s: it gets no second name: %s", path, error.strerror)
                return
            self._paths = (*self._paths, path)

    def release(self, path: Path) -> None:
        """Take the second name away, durably: the file is to be deleted, or nobody can lose it.

        Raises:
            StoreUnavailable: if the disk fails: with a second name that comes back after a crash
                the file would too.
        """
        with self._change:
            link = link_of(path)
            try:
                is_gone = self._drop(path)
            except OSError as error:
                raise self._disk.refused(link, error) from error
            if is_gone:
                self._disk.sync_names(link.parent)

    def check(self) -> list[Path]:
        """Give files that lost their first name that name back: which ones.

        Raises:
            StoreUnavailable: if that cannot be done; the store is poisoned then.
        """
        with self._change:
            lost = [path for path in self._paths if not path.exists()]
            for path in lost:
                link = link_of(path)
                if link.exists():
                    # With the file its folder may have gone.
                    self._disk.make_folders(path.parent)
                try:
                    self._disk.link(link, path)
                except OSError as error:
                    reason = f"{path}: somebody deleted it, and it cannot come back"
                    raise self._disk.health.poison(f"{reason}: {error.strerror}") from error
                self._disk.sync_names(path.parent)
                logger.warning("%s: somebody deleted it while it was in use; it is back", path)
            return lost

    def _drop(self, path: Path) -> bool:
        """Take a second name away; whether there was one. Raises OSError if it stays."""
        self._paths = tuple(other for other in self._paths if other != path)
        try:
            self._disk.unlink(link_of(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def close(self) -> None:
        """Check, and take all second names away.

        Where the check fails they stay, for the next opening.
        """
        with contextlib.suppress(StoreUnavailable):
            self.check()
            for path in self._paths:
                # Not durably: one that comes back is that of a file which is there.
                with contextlib.suppress(OSError):
                    self._drop(path)

    def restore(self, folders: Iterable[Path]) -> list[Path]:
        """Finish what a crash left: files that have only their second name get the first back.

        Returns:
            Which ones.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        back = []
        for folder in folders:
            second = link_of(folder / "any").parent
            names = self._disk.names_in(second)
            self._paths = tuple(folder / name for name in names)
            back += self.check()
            for name in names:
                self.release(folder / name)
        return back


def link_of(path: Path) -> Path:
    """Where the second name of a file is, if it has one."""
    folder = path.parent
    return folder.parent / SIDECAR / _NAMES / folder.name / path.name
