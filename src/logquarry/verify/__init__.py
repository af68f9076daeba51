"""Checking a store: every frame, blank, queue entry, index chain and the checkpoint.

What is wrong comes as typed findings, never as an exception.
"""

from logquarry.verify.findings import Finding, Severity, VerifyReport
from logquarry.verify.verify import verify_store

__all__ = ["Finding", "Severity", "VerifyReport", "verify_store"]
