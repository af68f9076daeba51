"""Copies every message that can be read without errors from a damaged store into a new store."""
