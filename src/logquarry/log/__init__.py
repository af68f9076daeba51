"""Reads the commit log in bulk: lists files, goes through frames, filters and decodes them."""
