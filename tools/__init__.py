"""Scripts that made files of this repository; nothing here is installed."""
