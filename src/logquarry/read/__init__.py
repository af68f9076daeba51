"""The read path: get, query by key or time, plans of filtered reads, and the end of the log."""
