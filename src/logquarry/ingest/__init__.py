"""Adds messages to stores: imports exported files, and loads rows of Spark."""
