"""The transactions of RocketMQ 3.x: state table, redo log, and their recovery."""
