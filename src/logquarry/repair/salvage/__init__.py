"""Copies every sound message of a damaged store into a new store."""
