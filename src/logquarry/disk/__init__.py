"""The files that a writer keeps: disk port, locks, small files, mapped files."""
