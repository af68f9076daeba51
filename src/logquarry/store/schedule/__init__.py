"""Delayed messages: they wait in the schedule topic's queues and are delivered when due."""
