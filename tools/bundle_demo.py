"""Makes src/logquarry/data/real-broker.tar.xz from tests/data/golden.tar.xz.

The store of `logquarry demo` is the store that a real RocketMQ broker wrote for the tests. Every
run makes the same archive: members are sorted, owners are cleared, and each file keeps its
modification time, which retention and reports use.

Run ``python -m tools.bundle_demo`` in the project's root.
"""

from __future__ import annotations

import lzma
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests/data/golden.tar.xz"
TARGET = ROOT / "src/logquarry/data/real-broker.tar.xz"
FOLDER = "golden/real-broker"


def bundle(source: Path = SOURCE, target: Path = TARGET) -> None:
    """Write the `real-broker` folder of `source` to `target`, with `real-broker/` as its root."""
    with tarfile.open(
        source, "r|xz"
    ) as golden:  # read it once: a seek back would unpack the archive again
        members = []
        for member in golden:
            if member.name == FOLDER or member.name.startswith(FOLDER + "/"):
                file = golden.extractfile(member)
                members.append((member, file.read() if file else b""))
    members.sort(key=lambda found: found[0].name)
    with (
        lzma.open(target, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as bundled,
    ):
        for member, content in members:
            member.name = member.name.removeprefix("golden/")
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() else 0o644
            bundled.addfile(member, BytesIO(content))


if __name__ == "__main__":
    bundle()
