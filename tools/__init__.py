"""Scripts for work on this repository; nothing here is installed."""
