"""Exported messages back into a store: files found, read as rows, checked, and put as they were."""
