"""Lists everything below a folder of a store. It does not follow links to parent folders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from logquarry.log.filesystem import FileSystem

_MOST_FOLDERS: Final = 64
"""Maximum number of nested folders to list. No version of RocketMQ nests more than five."""


class Below(NamedTuple):
    """One name below a folder.

    Attributes:
        path: its path below the store's root.
        is_dir: whether it is a folder; its contents follow.
        wrong: why it is neither a file nor a folder that can be read; None if it is one of them.
    """

    path: str
    is_dir: bool
    wrong: str | None


def below(filesystem: FileSystem, folder: str) -> Iterator[Below]:
    """All names below a folder; links to files and folders are followed.

    Args:
        folder: path of the folder below the root.

    Raises:
        StoreNotFound: if a folder cannot be read.
    """
    waiting: list[tuple[str, tuple[str, ...]]] = [(folder, (filesystem.real_path(folder),))]
    while waiting:
        path, parents = waiting.pop()
        for entry in filesystem.list(path):
            name = f"{path}/{entry.name}"
            if not entry.is_dir:
                yield Below(name, False, filesystem.why_no_file(name))
                continue
            real = filesystem.real_path(name)
            wrong = None
            if any(f"{parent}/".startswith(f"{real.rstrip('/')}/") for parent in parents):
                wrong = "is a link to a folder that contains it"
            elif len(parents) >= _MOST_FOLDERS:
                wrong = f"is in more than {_MOST_FOLDERS} folders"
            else:
                waiting.append((name, (*parents, real)))
            yield Below(name, True, wrong)
        for link in filesystem.broken_links(path):
            name = f"{path}/{link}"
            yield Below(name, False, filesystem.why_no_file(name))
