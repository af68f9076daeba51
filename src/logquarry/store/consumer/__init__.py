"""Consumer groups: consumers, tag and SQL92 filters, offsets, and the assignment of queues."""
