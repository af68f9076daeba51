"""Checks and repairs stores: verify, recover, rebuild, salvage, diff.

Each call that changes files raises StoreUnavailable if the disk fails or is full.
"""
