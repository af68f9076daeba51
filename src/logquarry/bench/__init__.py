"""The benchmarks of ``logquarry bench``: writing, reading, checking and recovering stores."""
