"""Frames that were staged beside a store, brought into its log exactly once."""
