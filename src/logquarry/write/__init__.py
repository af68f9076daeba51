"""The write path: frames into the log, flush waits, dispatch to consume queues and index."""
