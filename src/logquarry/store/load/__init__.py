"""Appends frames that were staged beside a store to its log, exactly once."""
