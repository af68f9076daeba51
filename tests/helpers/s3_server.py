"""Starts an S3 server on loopback in a child process, and copies golden stores into it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyarrow import fs as pafs

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

Options = dict[str, str]


@contextmanager
def s3_server() -> Iterator[Options]:
    """Yield the storage options of a server that ends with the block, or with this process."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        # The server ends when its input ends.
        port = int(process.stdout.readline())
        yield {
            "endpoint_override": f"127.0.0.1:{port}",
            "scheme": "http",
            "access_key": "test",
            "secret_key": "test",
            "region": "us-east-1",
        }


def put_stores(options: Options, stores: dict[str, Path]) -> dict[str, str]:
    """Copy stores into a new bucket: broker name to URL."""
    s3 = pafs.S3FileSystem(**options, allow_bucket_creation=True)
    s3.create_dir("bucket")
    local = pafs.LocalFileSystem()
    for name, store in stores.items():
        target = f"bucket/brokers/{name}/store"
        pafs.copy_files(str(store), target, source_filesystem=local, destination_filesystem=s3)
    return {name: f"s3://bucket/brokers/{name}/store" for name in stores}
