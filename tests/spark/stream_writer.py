"""A process that writes a store for as long as a test reads it: run with -m."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import logquarry as lq


def main(root: Path, count: int, pause_ms: int) -> None:
    """Put ``count`` messages, numbered in their bodies, some at a time."""
    config = lq.StoreConfig(
        mapped_file_size_commit_log=1 << 18, mapped_file_size_consume_queue=20 * 1000
    )
    with lq.MessageStore.open(root, config=config, mode="rw") as store:
        print("open", flush=True)
        for start in range(0, count, 50):
            store.put_many(
                [
                    lq.Message(topic=f"t{n % 3}", queue_id=n % 2, body=b"%d" % n, keys=f"k{n}")
                    for n in range(start, min(start + 50, count))
                ]
            )
            time.sleep(pause_ms / 1000)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
