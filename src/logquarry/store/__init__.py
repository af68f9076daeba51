"""The files of one store, read as RocketMQ reads them: its log, its queues, its index.

Read-only: opening a store makes, locks and touches nothing, so that it can be read beside a live
broker. What the derived files do not tell (they are gone, or damaged) is read from the log.
"""
