"""What follows the log: its messages' way into consume queues and index."""
