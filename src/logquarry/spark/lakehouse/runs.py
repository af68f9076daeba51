"""What an export that died has left behind: files that no table knows.

::

    DEST/_logquarry/RUN.json     a run that is at work, and where its next commit moves the marks

Names of files have the run's in them. The note is written before the first file of a commit and
removed behind the commit. A run that finds a note of another one (which is dead, for it has the
lock) looks at the marks: where they have not come to where the note says, the commit was not made,
and the files of that run are no part of anything. Else they are the table's, and stay for good:
whoever compacts a table removes its files when its history allows that.

A commit that was on its way may be made yet, after such a look: a catalog that did not answer may
be at work. So an empty commit is put in its way first, behind which it would be refused.

Where there are no locks nobody knows who is dead, and such files stay; a table's own cleaning
(``vacuum``, ``remove_orphan_files``) takes them.
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
    """One export at work: it has the destination to itself, as far as there are locks.

    Args:
        folder: the destination.
        tables: what it writes to, the last one first to have its commit.
    """

    def __init__(self, folder: OutputFolder, tables: Sequence[Table]) -> None:
        self._folder = folder
        self._tables = tables
        self._lock: int | None = None
        self.name = ""

    def begin(self) -> None:
        """Take the lock, and remove what runs that died have left.

        Raises:
            StoreUnavailable: if another export is at work there.
        """
        self._folder.make()
        self._lock = self._folder.lock()
        try:
            self._clear()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def begin_commit(self, marks: Marks) -> None:
        """Say which files will be there, before the first of them is."""
        self.name = uuid.uuid4().hex[:12]
        self._folder.make(CONTROL)
        self._tell(marks, is_on_its_way=False)

    def tell(self, marks: Marks) -> None:
        """Say where exactly the commit moves the marks, before it is made."""
        self._tell(marks, is_on_its_way=True)

    def _tell(self, marks: Marks, *, is_on_its_way: bool) -> None:
        path = self._note(self.name)
        document = {"marks": dict(marks), _ON_ITS_WAY: is_on_its_way}
        self._folder.write_json(path, document, by_way_of=f"{path}.tmp")

    def commit_done(self) -> None:
        """Forget the commit: all its files are the table's."""
        self._folder.remove(self._note(self.name))
        self.name = ""

    def give_up(self) -> None:
        """Remove the files of a commit that is not made, and will not be."""
        if self.name:
            self._clear_run(self.name, may_be_on_its_way=False)
            self.name = ""

    def leave(self) -> None:
        """Leave all as it is, for the next run to find out whether the commit was made."""
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
            # A power cut may leave an empty one. Its run's files stay, and are nobody's.
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
    """Whether a commit was made; where not, it will not be."""
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
