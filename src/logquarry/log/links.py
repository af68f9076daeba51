"""Broken links in a store's folders, such as links to a disk that is not mounted.

A store without the target of a link looks like a store whose messages are missing or expired.
"""

from __future__ import annotations

from collections.abc import Iterable

from logquarry.errors import StoreNotFound
from logquarry.log.filesystem import FileSystem
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE, StoreFile, is_offset_name


class BrokenLink(StoreNotFound):
    """A folder or file of a store is a link to a path that does not exist."""


def require_target(filesystem: FileSystem, path: str) -> None:
    """Raise BrokenLink if a path below the root is a link whose target does not exist."""
    target = filesystem.broken_link(path)
    if target is not None:
        raise BrokenLink(
            f"{filesystem.full_path(path)}: it is a link to {target}, which does not exist:"
            " mount that disk, or correct the link"
        )


def require_queue_links(
    filesystem: FileSystem, topic: str, queue_id: int, files: Iterable[StoreFile] = ()
) -> None:
    """Raise BrokenLink if a queue's folder or one of its listed files is a broken link, and
    StoreNotFound if one of ``files`` is a pipe or the like.
    """
    for file in files:
        # The list of files has such a path as an empty file.
        if not file.size and (wrong := filesystem.why_no_file(file.path)) is not None:
            path = filesystem.full_path(file.path)
            raise StoreNotFound(f"{path}: it {wrong}: move it out of the store")
    if not is_folder_name(topic):
        return
    for root in (CONSUME_QUEUE, BATCH_QUEUE):
        folder = f"{root}/{topic}/{queue_id}"
        for path in (f"{root}/{topic}", folder):
            require_target(filesystem, path)
        for path in sorted(filesystem.dead_links):
            parent, _, name = path.rpartition("/")
            if parent == folder and is_offset_name(name):
                require_target(filesystem, path)


def is_folder_name(topic: str) -> bool:
    """Whether a topic can be the name of a folder. The topic of an untrusted message must not lead
    out of the store.
    """
    return topic not in ("", ".", "..") and "/" not in topic and "\0" not in topic
