"""Puts messages: frames in the log, syncs, then consume queues and index."""
