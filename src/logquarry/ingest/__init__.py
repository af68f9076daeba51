"""Adds messages to stores: imports of exported files, and loads of Spark's rows."""
