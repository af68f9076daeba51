"""Compares two stores."""
