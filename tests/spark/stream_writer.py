"""A process that writes a store while a test reads it: run with -m."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import logquarry as lq

STEP = 50
"""Messages between two pauses."""


def main(root: Path, count: int, pause_ms: int) -> None:
    """Put numbered messages, and print how many.

    Args:
        root: folder of the store.
        count: number of messages; 0 to put one after the other until stdin is closed.
        pause_ms: pause after each fifty, in milliseconds.
    """
    config = lq.StoreConfig(
        mapped_file_size_commit_log=1 << 18, mapped_file_size_consume_queue=20 * 1000
    )
    with lq.MessageStore.open(root, config=config, mode="rw") as store:
        print("open", flush=True)
        if not count:
            count = _put_until_told(store)
        else:
            for start in range(0, count, STEP):
                store.put_many([_message(n) for n in range(start, min(start + STEP, count))])
                time.sleep(pause_ms / 1000)
    print(count, flush=True)


def _put_until_told(store: lq.StoreWriter) -> int:
    told = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        told.set()

    threading.Thread(target=wait, daemon=True).start()
    number = 0
    while not told.is_set():
        try:
            result = store.put(_message(number))
        except lq.errors.StoreUnavailable as error:
            # A process that was stopped for seconds creates its file late: try again.
            if "in time" not in str(error):
                raise
            time.sleep(0.1)
            continue
        assert result.ok
        number += 1
    return number


def _message(number: int) -> lq.Message:
    return lq.Message(
        topic=f"t{number % 3}", queue_id=number % 2, body=b"%d" % number, keys=f"k{number}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
