"""What is done to a store that was not closed in order: planned first, and then applied."""
