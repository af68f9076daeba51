"""Appends frames that Spark tasks have staged to a store's log, exactly once."""
