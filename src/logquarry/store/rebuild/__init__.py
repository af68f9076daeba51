"""Consume queues and index made anew from the log."""
