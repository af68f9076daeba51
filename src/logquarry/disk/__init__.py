"""The files of a store that is written: disk port, locks, small files, mapped files."""
