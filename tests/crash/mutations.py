"""Removes each sync of the code in turn and shows that a test fails.

Run ``python -m tests.crash.mutations``. It finds each place that syncs a file or a folder by
running stores and by recovering damaged ones. Then it makes the place do nothing and checks crash
images until one violates the model.
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from logquarry.errors import LogquarryError
from logquarry.repair.recover.plan import RecoveryMode
from tests.crash.checks import check_image
from tests.crash.harmed import recovery_of
from tests.crash.workload import STORE, recorded

RUNS: Final = 16
EACH: Final = 60
_FINDING: Final = 12
_RECOVERIES: Final[Mapping[RecoveryMode, int]] = {"safe": 90, "rocketmq": 30}

NOT_MISSED: Final[Mapping[str, str]] = {
    "fsync * make_file": "a later fdatasync of the file brings its size along; until then nothing "
    "counts on it. Kept so that a file's size is durable before its first frame",
    "sync_folder .logquarry/names *": "second names only serve while another program deletes "
    "files. Kept so that none comes back after a retention: it would restore a deleted file",
    "fdatasync checkpoint *": "an older checkpoint is true too: recovery starts earlier",
    "fdatasync .logquarry *": "a lower mark is true too, and one that speaks of another checkpoint "
    "counts for nothing",
    "sync_folder commitlog * discard": "an unused file is empty, and may reappear",
    "sync_folder root * CheckpointFile": "without a checkpoint recovery starts at the first file",
    "sync_folder root * StoreLock": "no code reads the lock file",
    "sync_folder root * AbortFile.remove": "a store that says it was not closed is only recovered",
    "sync_folder .logquarry *": "without a durable mark a store is judged as one of RocketMQ's",
    "sync_folder root * DurableFile": "likewise",
    "sync_folder root * make_folders StoreEngine.__init__": "sync_parent does it again",
    "sync_folder root * sync_parent": "make_folders did it, unless who made the folder died there",
    "sync_folder root * make_folders StoreFiles.__init__": "the checkpoint's name is synced "
    "after it",
    # Numbers for recoveries.
    "fdatasync .logquarry/names *": "second names only serve while another program deletes files: "
    "where the first name is, sync_files brings the same file to the disk",
    "fdatasync commitlog * _Work._extend": "zeros that are not there are added again, and "
    "sync_files comes before anything says that it is done",
    "fdatasync commitlog * _Work._zero": "sync_files comes before anything says that it is done, "
    "and no message is written until then. Kept so that cut bytes are zeros before the next write",
    "fdatasync consumequeue * clear_from QueueTable": "likewise: what is written behind it is made "
    "from the log again if the recovery begins again",
    "fdatasync consumequeue * _Work._mend_queues_and_index": "sync_files does it again, before the "
    "checkpoint says so",
    "fdatasync index * sync_files _Work": "what stays was synced when it was written, or the "
    "checkpoint would not speak of it; what is made, by IndexKeeper.flush",
    "sync_folder .logquarry/quarantine * Disk.move": "the old name of a renamed file does not go "
    "before the new one is there, and the old one's folder is synced next",
    "fdatasync .logquarry/quarantine/consumequeue *": "what a queue had is made from the log "
    "again: a copy that is lost tells less of what was wrong",
    "sync_folder .logquarry/quarantine/consumequeue *": "likewise",
    "sync_folder .logquarry/quarantine * _Work._mend_queues_and_index": "likewise, and index",
    "sync_folder .logquarry/quarantine * QueueTable": "likewise",
    "sync_folder .logquarry/quarantine * JavaQueue": "likewise",
    "sync_folder root * AbortFile.make _Work.run": "the stores of this check were not closed in "
    "order, and have it already",
    "sync_folder root * AbortFile.make _carry_out": "likewise",
    "sync_folder root * NameGuard": "the folder of second names is there already",
    "sync_folder root * sync_files": "who makes something in it syncs its name",
    "sync_folder index * NameGuard": "a name that is lost again is given back at the next opening",
    "sync_folder commitlog * NameGuard": "likewise",
    "sync_folder commitlog * Disk.move": "sync_files comes before anything says that it is done",
    "sync_folder consumequeue * Disk.move": "likewise",
    "sync_folder index * Disk.move": "likewise",
    "sync_folder commitlog * MappedFile.delete": "an old name that comes back is taken away again",
    "sync_folder commitlog * sync_files": "our writers sync the names of what they make, and so do "
    "moves; it is for logs of others, whom no run of ours is",
    "sync_folder consumequeue * sync_files": "likewise",
    "sync_folder index * sync_files": "likewise",
    "sync_folder consumequeue * Applied._keep": "sync_files comes before anything says so",
    "sync_folder .logquarry/quarantine * disk_json": "the report only tells; it is written "
    "again by the next run",
}
"""Places that nothing misses, and why that is right: words that stand in their names in order."""


class Missed(NamedTuple):
    """The first violation without a sync: after how many crash images, and its reason."""

    crashes: int
    said: str


def sites() -> list[str]:
    """The places that sync in some runs and some recoveries."""
    return sorted({*sites_at_work(), *recovery_sites()})


def sites_at_work() -> Iterator[str]:
    """The places that sync in some runs, in the order of each run; it begins when needed."""
    for seed in range(_FINDING):
        yield from sorted(_sites_of_run(seed))


def recovery_sites() -> Iterator[str]:
    """The places that sync in some recoveries, in the order of each recovery."""
    for seed, mode in _recoveries():
        yield from _sites_of_recovery(seed, mode)


@cache
def _sites_of_run(seed: int) -> frozenset[str]:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        return frozenset(recorded(Path(folder) / "live", seed).sites)


@cache
def _sites_of_recovery(seed: int, mode: RecoveryMode) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        return tuple(recovery_of(Path(folder), seed, mode=mode).sites)


def _recoveries() -> Iterator[tuple[int, RecoveryMode]]:
    """Seeds and modes of recoveries; the modes alternate."""
    for seed in range(max(_RECOVERIES.values())):
        for mode, count in _RECOVERIES.items():
            if seed < count:
                yield seed, mode


def missed(site: str) -> Missed | None:
    """What notices that a place no longer syncs, None if nothing does."""
    found = missed_at_work(site) if site in sites_at_work() else None
    return found or missed_in_recovery(site)


def missed_in_recovery(site: str) -> Missed | None:
    """What power cuts of recoveries find if the place does not sync."""
    crashes = 0
    reached = (at for at in _recoveries() if site in _sites_of_recovery(*at))
    for seed, mode in islice(reached, RUNS):
        with tempfile.TemporaryDirectory(dir=_memory()) as folder:
            work = recovery_of(Path(folder), seed, mode=mode, ignored=[site])
            for wrong in work.crashes(random.Random(seed), EACH, Path(folder) / "image"):
                crashes += 1
                if wrong:
                    return Missed(crashes, wrong[0])
    return None


def missed_at_work(site: str) -> Missed | None:
    """What power cuts of a working store find if the place does not sync."""
    crashes = 0
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        for seed in range(RUNS):
            live, image = Path(folder) / "live", Path(folder) / "image"
            work = recorded(live, seed, ignored=[site])
            shutil.rmtree(live)
            if site not in work.sites:
                continue
            rng = random.Random(seed)
            for _ in range(EACH):
                point = rng.choice(work.points)
                point.state.crash(rng).write(image)
                try:
                    wrong = check_image(image / STORE, work.config, work.model, point.mark)
                except (LogquarryError, OSError) as error:
                    wrong = [f"{type(error).__name__}: {error}"]
                shutil.rmtree(image)
                crashes += 1
                if wrong:
                    return Missed(crashes, wrong[0])
    return None


def excuse(site: str) -> str | None:
    """Why a place needs no test that fails without its sync; None if it needs one."""
    for words, reason in NOT_MISSED.items():
        kind, part, *rest = [word for word in words.split() if word != "*"]
        is_any = words.split()[1] == "*"
        wanted = [part, *rest] if is_any else rest
        head, _, chain = site.partition(": ")
        where = head.split()[1]
        # Quarantine is not part of what is said of the sidecar's own files.
        is_below = part != ".logquarry" and where.startswith(f"{part}/")
        is_meant = head.startswith(kind) and (is_any or where == part or is_below)
        if is_meant and all(word in chain for word in wanted):
            return reason
    return None


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def table() -> Iterator[tuple[str, Missed | None]]:
    """Each place, and the test that failed without its sync."""
    for site in sites():
        yield site, missed(site)


def main() -> int:
    """Print the table, and return 1 if a needed sync can go without a failure."""
    logging.disable(logging.CRITICAL)
    status = 0
    for site, found in table():
        reason = excuse(site)
        said = f"{found.crashes} crashes: {found.said[:90]!r}" if found else f"NOT MISSED: {reason}"
        print(f"{site}\n    {said}", flush=True)
        status |= found is None and reason is None
    return status


if __name__ == "__main__":
    sys.exit(main())
