"""The rules of recovery in which versions of RocketMQ differ, for stores with queue files.

The source of 4.9.3, 5.1.4, 5.3.3, 5.4.0 and 5.5.0 has them in ``CommitLog.recoverNormally``,
``recoverAbnormally`` and ``DefaultMessageStore.load``. All of 5.x read V2 frames, know the delay
levels during the recovery, and dispatch afterwards from the log's end on, not from the end of the
queues. No file distinguishes 5.1 from 5.3: both get the rules of 5.3, which dispatches more. (After
a clean shutdown, 5.1 dispatches no message that is in the log already.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from logquarry.read.features import Writer

_MOST_FILES: Final = 10


@dataclass(frozen=True, slots=True)
class JavaRules:
    """The rules of one version.

    Attributes:
        name: the version, in words.
        is_5: whether the rules of all versions of 5.x hold.
        most_files: a recovery begins at most so many files before the end; None for no limit.
        starts_by_frame: the first frame of the file where a recovery begins must be sound, and a
            normal recovery compares its PHYSICALOFFSET with the end of the queues. Before 5.4, a
            normal recovery compares the file's name.
        starts_by_offset: a recovery after a crash begins at the file that the checkpoint's offset
            of the queues names, if there is one. Otherwise it compares store times.
    """

    name: str
    is_5: bool
    most_files: int | None = None
    starts_by_frame: bool = False
    starts_by_offset: bool = False


V4_9: Final = JavaRules("4.9.3", False)
V5_3: Final = JavaRules("5.3.3", True)
V5_4: Final = JavaRules("5.4.0", True, _MOST_FILES, True)
V5_5: Final = JavaRules("5.5.0", True, _MOST_FILES, True, True)


def rules_for(writer: Writer) -> JavaRules:
    """The rules of the version that wrote a store, as far as its files show it."""
    if not writer.is_5:
        return V4_9
    assert writer.at_least is not None
    return {"5.4.0": V5_4, "5.5.0": V5_5}.get(writer.at_least, V5_3)
