"""Verify: checks a whole store (log, consume queues, index, checkpoint) and returns findings."""

from logquarry.repair.verify.findings import Finding, Severity, VerifyReport
from logquarry.repair.verify.verify import verify_store

__all__ = ["Finding", "Severity", "VerifyReport", "verify_store"]
