"""The transactions of RocketMQ 3.x: the state table, the redo log, and the recovery of both."""
