"""``fill`` writes the same bytes as ``StoreBuilder.put``."""

from __future__ import annotations

import random
from pathlib import Path

from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.testing import builder
from logquarry.testing.builder import StoreBuilder, fill, fill_properties


def fill_plainly(root: Path, total_bytes: int, *, keys: int, file_size: int) -> int:
    rng = random.Random(7)
    pool = rng.randbytes(1 << 22).translate(builder._ALPHABET * 4)
    count = 0
    with StoreBuilder(root, file_size=file_size, queue_file_size=4_000) as store:
        while store.offset < total_bytes:
            length = rng.randint(10, 300)
            at = rng.randrange(len(pool) - length)
            number = rng.randrange(3 * 2)
            store.put(
                f"topic-{number // 2:02d}",
                pool[at : at + length],
                queue_id=number % 2,
                properties_string=fill_properties(count, keys),
                store_timestamp=1_700_000_000_000 + count // 50,
            )
            count += 1
    return count


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def test_fill_writes_what_the_reference_codec_writes(tmp_path: Path) -> None:
    for keys in (0, 1, 3):
        slow, quick = tmp_path / f"slow{keys}", tmp_path / f"quick{keys}"
        count = fill_plainly(slow, 300_000, keys=keys, file_size=40_000)
        assert count == fill(
            quick,
            total_bytes=300_000,
            body=(10, 300),
            topics=3,
            queues=2,
            keys=keys,
            file_size=40_000,
            queue_file_size=4_000,
            seed=7,
        )
        assert contents(quick) == contents(slow)
        assert not verify_store(StoreLayout.open(quick)).has_damage


def test_fill_counts_messages(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = fill(
        tmp_path / "s",
        count=10_000,
        body=(0, 0),
        file_size=1 << 20,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert written == 10_000
    report = verify_store(StoreLayout.open(tmp_path / "s"))
    assert report.counts["messages"] == 10_000
    assert seen and seen[-1][1] == 10_000
