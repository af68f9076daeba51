"""Measures how fast stores are written, read, checked and recovered here."""
