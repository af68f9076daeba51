"""Reads single messages and parts of a store: by queue offset, by key, by time, by filter."""
