"""Appends the staged frames of Spark tasks to a store's log, exactly once."""
