"""Checks a whole store: log, consume queues, index, checkpoint.

Problems come back as typed findings, never as an exception.
"""

from logquarry.repair.verify.findings import Finding, Severity, VerifyReport
from logquarry.repair.verify.verify import verify_store

__all__ = ["Finding", "Severity", "VerifyReport", "verify_store"]
