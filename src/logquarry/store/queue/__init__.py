"""Consume queues, read from files or made in memory."""
