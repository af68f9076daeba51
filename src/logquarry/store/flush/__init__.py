"""What brings the log to the disk, and who waits for it."""
