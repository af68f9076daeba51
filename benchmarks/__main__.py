"""Run all benchmarks, one after the other: ``python -m benchmarks`` (``make bench``)."""

from __future__ import annotations

import sys

from benchmarks import bench_scan

if __name__ == "__main__":
    bench_scan.main(sys.argv[1:])
