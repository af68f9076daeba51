"""The files that a writer keeps: disk port, syncs, locks, threads, mapped files, config files."""
