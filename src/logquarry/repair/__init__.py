"""Checks and repairs stores: verify, recover, rebuild, salvage, diff."""
