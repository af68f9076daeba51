"""Reading a store: one place, a queue, a key, a time, or much of the log at once."""
