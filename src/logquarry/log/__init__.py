"""Reads the commit log in bulk: lists its files, walks its frames, and filters and decodes them."""
