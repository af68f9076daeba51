"""Reads messages, queues and the index; plans filtered reads; finds the end of the log."""
