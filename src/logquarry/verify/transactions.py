"""Checks the state table and the redo log of a store of 3.x against its log."""

from __future__ import annotations

from logquarry.files.layout import REDO_LOG, STATE_TABLE, StoreLayout
from logquarry.scan.walk import LogReader, Run
from logquarry.store.state_table.frames import transaction_frames
from logquarry.store.state_table.recovery import TransactionCheck
from logquarry.verify.findings import VerifyReport


def check_transactions(layout: StoreLayout, end: int, report: VerifyReport) -> None:
    """Find where table and redo log say something else than the log.

    After a crash they mostly do: that is a note then.

    Args:
        layout: the store's files.
        end: where its log ends.
        report: gets the findings.
    """
    check = TransactionCheck()
    # Frames whose body alone is bad count, as they do for queues.
    for event in LogReader(layout, bound=end, check_crc=False).events():
        if isinstance(event, Run):
            check.take(transaction_frames(event.window, event.rows))
    faults = list(check.table_faults(layout))
    for kind, is_stale in (("state_table_wrong", False), ("state_table_stale", True)):
        reasons = [reason for reason, stale in faults if stale is is_stale]
        if reasons:
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            crashed = layout.has_abort
            report.add(kind, STATE_TABLE, 0, reasons[0] + more, is_explained=crashed)
    fault = check.redo_fault(layout)
    if fault is not None:
        report.add("redo_log_wrong", REDO_LOG, 0, fault, is_explained=layout.has_abort)
