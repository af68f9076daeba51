"""The options of the source `rocketmq`.

given      what the user gave, by name, and the parsers of single values
offsets    where reading starts and ends
read       the options of a read, batch or stream
"""

from __future__ import annotations

from logquarry.spark.options.read import (
    DEFAULT_BATCH_BYTES,
    OffsetLimit,
    ReadOptions,
    parse_read_options,
)

__all__ = ["DEFAULT_BATCH_BYTES", "OffsetLimit", "ReadOptions", "parse_read_options"]
