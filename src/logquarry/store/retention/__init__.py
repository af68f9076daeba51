"""Retention: determines which files have expired, and deletes them."""
