"""The benchmarks of ``logquarry bench``: they write, read, check and recover stores."""
