"""Rebuilds consume queues and index from the log."""
