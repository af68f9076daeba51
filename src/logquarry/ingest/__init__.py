"""Brings messages into stores: imports of exported files, and loads of Spark's rows."""
