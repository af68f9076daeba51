"""Lists everything below a folder of a store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from logquarry.log.filesystem import FileSystem

_MOST_FOLDERS: Final = 64
"""Maximum number of nested folders. No version of RocketMQ nests more than five."""


class Below(NamedTuple):
    """One name below a folder. ``wrong``: why this is no file and no readable folder."""

    path: str
    is_dir: bool
    wrong: str | None


def below(filesystem: FileSystem, folder: str) -> Iterator[Below]:
    """Yield all names below a folder. Links are followed, except links to parent folders."""
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
