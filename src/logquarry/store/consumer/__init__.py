"""Consumer groups: subscriptions, offsets, and the assignment of queues to consumers."""
