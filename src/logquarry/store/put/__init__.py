"""From a message to its frame, and the frame's way into the log."""
