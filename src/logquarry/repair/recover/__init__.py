"""Recovers a store after a crash: looks, plans, then applies."""
