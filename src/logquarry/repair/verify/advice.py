"""The one command that a user types after a verification.

A report may have many findings, but the user types one command at a time. A recovery comes first,
because queues and index are built from the log.
"""

from __future__ import annotations

from typing import NamedTuple

from logquarry.format.frame import DamageKind
from logquarry.log.store_files import CONFIG
from logquarry.log.walk import MISSING_FILE
from logquarry.repair.verify.findings import Finding, VerifyReport
from logquarry.repair.verify.next_steps import STEPS, Action


class Next(NamedTuple):
    """The next step for a store.

    Attributes:
        words: command and options to put around the store's path, the command first.
        before: what the user does before typing the command; empty if nothing.
    """

    words: tuple[str, ...]
    before: str = ""


def next_step(report: VerifyReport) -> Next | None:
    """The next step after a verification; None if there is nothing to do."""
    damage = [finding for finding in report.findings if finding.severity == "damage"]
    kinds = {finding.kind for finding in report.findings}
    if not damage and ("abort_file" not in kinds or "live" in kinds):
        return None
    harmed = {kind.label for kind in DamageKind} | {MISSING_FILE}
    recorded = [f for f in damage if f.kind in harmed and f.offset in report.recorded]
    actions = {_action(found) for found in damage if found not in recorded}
    is_built = actions & {Action.QUEUES, Action.INDEX}
    if "abort_file" in kinds and (is_built or not damage):
        actions.add(Action.RECOVER)
    if not report.counts.get("log_files") and damage:
        return Next(("verify",), "mount the disk of commitlog/, or put its files back")
    before = "stop the process that has the store open" if "live" in kinds else ""
    if "://" in report.store and not report.store.startswith("file:"):
        # Every repair needs a local folder; a salvage reads the store where it is.
        return Next(("salvage", "--into", "DIR"), before)
    if Action.RECOVER in actions:
        return Next(("recover",), before)
    if is_built:
        only = [] if len(is_built) > 1 else ["--queues" if Action.QUEUES in actions else "--index"]
        return Next(("rebuild", "--in-place", *only), before)
    if recorded:
        return Next(("salvage", "--into", "DIR"), before)
    if Action.RESTORE in actions:
        file = next(f.file for f in damage if _action(f) is Action.RESTORE)
        return Next(("verify",), f"put {file} back from a backup or from {file}.bak")
    place = str(next(f.offset for f in damage if _action(f) is Action.READ))
    return Next(("messages", "--offset", place))


def _action(finding: Finding) -> Action:
    action = STEPS[finding.kind][0]
    # A recovery does not replace the files of a broker's configuration; a rebuild makes timercheck.
    if finding.file.startswith(f"{CONFIG}/") and action is not Action.QUEUES:
        return Action.RESTORE
    return action
