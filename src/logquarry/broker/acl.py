"""Accounts: who may do what, by RocketMQ 4.9's signatures (``PlainPermissionManager``)."""

from __future__ import annotations


class AccessControl:
    """Accounts and their permissions."""
