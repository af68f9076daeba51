"""Delayed messages: waited for in the schedule topic's queues, delivered when their time comes."""
