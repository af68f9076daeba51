"""Delayed messages: they wait in the queues of the schedule topic until their delivery time."""
