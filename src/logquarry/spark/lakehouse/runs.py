"""Removes files that a crashed export left behind: files that no table contains.

::

    DEST/_logquarry/RUN.json     note of a running export: the marks of its next commit

The names of files contain the name of their run. A run writes its note before the first file of a
commit and removes it after the commit. A run that finds the note of another run (which has crashed,
because this run holds the lock) compares it with the table's marks. If the table has not reached
the marks of the note, the commit was not made, and the files of that run are removed. Otherwise
they belong to the table and stay.

The commit may still be under way in a catalog that did not answer. Therefore the run first makes an
empty commit: after it, the catalog rejects the earlier one.

In an object store there are no locks, so such files stay; the table's own cleaning (``vacuum``,
``remove_orphan_files``) removes them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Final

from logquarry.spark.lakehouse.table import Marks, Table
from logquarry.spark.lakehouse.write import is_of_run
from logquarry.spark.output import OutputFolder

CONTROL: Final = "_logquarry"
_NOTE: Final = ".json"
_ON_ITS_WAY: Final = "on_its_way"


class Run:
    """A running export; on a local disk it locks the destination.

    Args:
        folder: the destination.
        tables: its tables, in the reverse order of their commits.
    """

    def __init__(self, folder: OutputFolder, tables: Sequence[Table]) -> None:
        self._folder = folder
        self._tables = tables
        self._lock: int | None = None
        self.name = ""

    def begin(self) -> None:
        """Lock the destination and clean up after runs that crashed.

        Raises:
            StoreUnavailable: if another export is running there.
        """
        self._folder.make()
        self._lock = self._folder.lock()
        try:
            self._clear()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin_commit(self, marks: Marks) -> None:
        """Write the note of the next commit; call it before the first file is written."""
        self.name = uuid.uuid4().hex[:12]
        self._folder.make(CONTROL)
        self._tell(marks, is_on_its_way=False)

    def tell(self, marks: Marks) -> None:
        """Update the note with the final marks; call it just before the commit."""
        self._tell(marks, is_on_its_way=True)

    def _tell(self, marks: Marks, *, is_on_its_way: bool) -> None:
        path = self._note(self.name)
        document = {"marks": dict(marks), _ON_ITS_WAY: is_on_its_way}
        self._folder.write_json(path, document, by_way_of=f"{path}.tmp")

    def commit_done(self) -> None:
        """Remove the note: all files belong to the table now."""
        self._folder.remove(self._note(self.name))
        self.name = ""

    def give_up(self) -> None:
        """Remove the files of a commit that was not made and cannot be made later."""
        if self.name:
            self._clear_run(self.name, may_be_on_its_way=False)
            self.name = ""

    def leave(self) -> None:
        """Keep note and files for the next run, which determines whether the commit was made."""
        self.name = ""

    def _clear(self) -> None:
        if self._lock is None:
            return
        for path in sorted(self._folder.files(CONTROL)):
            if path.endswith(".tmp"):
                self._folder.remove(path)
            elif path.endswith(_NOTE):
                self._clear_run(path.rpartition("/")[2].removesuffix(_NOTE))

    def _clear_run(self, run: str, *, may_be_on_its_way: bool = True) -> None:
        try:
            document = self._folder.read_json(self._note(run))
        except ValueError:
            # A power cut can leave an empty note. The files of that run stay, outside of any table.
            document = None
        wanted = document.get("marks") if isinstance(document, dict) else None
        if run.isalnum() and isinstance(wanted, dict):
            may_come = may_be_on_its_way and document.get(_ON_ITS_WAY) is not False
            for table in self._tables:
                if not _has(table, wanted, may_come=may_come):
                    for path in [p for p in table.folder.files() if is_of_run(p, run)]:
                        table.folder.remove(path)
        self._folder.remove(self._note(run))

    @staticmethod
    def _note(run: str) -> str:
        return f"{CONTROL}/{run}{_NOTE}"


def _has(table: Table, wanted: Marks, *, may_come: bool) -> bool:
    """Whether the commit was made; if not, this makes sure that it never will be."""
    state = table.look()
    if state is None or _reached(state.marks(wanted), wanted):
        return state is not None
    if not may_come:
        return False
    table.append((), {}, {})
    state = table.look()
    return state is not None and _reached(state.marks(wanted), wanted)


def _reached(found: Marks, wanted: Marks) -> bool:
    return bool(wanted) and all(found.get(name, -1) >= value for name, value in wanted.items())
