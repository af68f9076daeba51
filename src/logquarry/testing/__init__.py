"""Tools for tests and benchmarks, ours and our users'."""
