"""Retention: plans which files have expired, and deletes them."""
