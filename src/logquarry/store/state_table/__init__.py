"""The transactions of RocketMQ 3.x: state table, redo log, their recovery and the check timer.

::

    frames     what of the log concerns transactions
    book       which transactions are open, as frames tell it, and which unit is whose
    files      both sequences of units, read
    keeper     both, written: by the dispatcher
    found      whether they agree with the log when a store is opened that was closed in order
    recovery   what becomes of them when it was not
    prepared   what users do with transactions; the check timer

The log is the truth: what a message of a transaction says there counts, and table and redo log
follow. So whatever a crash leaves of them, they are made again from it.
"""
