"""The files that a writer changes, and its disk calls, syncs, locks and background threads."""
