"""Where bytes come from: the files of a store, on a local disk or behind an object store.

Read-only: nothing here creates, locks, truncates or touches a file, so that a store can be read
beside a live writer.
"""
