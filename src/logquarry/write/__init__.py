"""The write path: put, frames into the log, flush, and dispatch to consume queues and index."""
