"""Benchmarks, as `make bench` runs them."""
