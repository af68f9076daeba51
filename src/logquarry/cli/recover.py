"""``logquarry recover``: what a store needs after a crash, and doing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from logquarry import text
from logquarry.cli import options
from logquarry.cli.output import Output

if TYPE_CHECKING:
    from logquarry.repair.recover.plan import RecoveryMode, RecoveryPlan

_FINDINGS, _REFUSED = 1, 4
_MOST_TOLD = 40


@click.command()
@options.store
@click.option(
    "--mode",
    type=click.Choice(["safe", "rocketmq"]),
    default="safe",
    show_default=True,
    help="safe: keep every message that stands whole. rocketmq: do what RocketMQ's own recovery "
    "would, which ends the log at the first bad message.",
)
@click.option("--apply", is_flag=True, help="Do it. Without it nothing is touched.")
@options.as_json
@options.config
@options.quiet
def recover(
    store: str, mode: RecoveryMode, apply: bool, as_json: bool, config: str | None, quiet: bool
) -> None:
    """Say what a store needs after a crash; with --apply do it, and close the store in order.

    Nothing is deleted: what has to go is moved to STORE/.logquarry/quarantine/. Exit code 1 if
    there is something to do (without --apply), 0 if there is nothing, or it was done; 4 if a
    process has the store open.
    """
    out = Output(quiet=quiet)
    settings = options.store_config(config)
    from logquarry.repair.recover.recover import recover as recover_store

    with out.progress("recovering" if apply else "reading", in_bytes=True) as progress:
        plan = recover_store(store, mode=mode, apply=apply, config=settings, progress=progress)
    is_due = plan.is_needed and not apply
    if as_json:
        out.json(plan.to_json() | {"needed": plan.is_needed, "applied": apply and plan.is_needed})
    else:
        _show(out, plan, store, is_applied=apply)
        if plan.refused is None and is_due:
            words = ["recover", store, "--mode", mode] if mode != "safe" else ["recover", store]
            out.line()
            out.line(f"next: {options.command_line(*words, '--apply', config=config)}")
    if plan.refused is not None or is_due:
        click.get_current_context().exit(_FINDINGS if plan.refused is None else _REFUSED)


def _show(out: Output, plan: RecoveryPlan, store: str, *, is_applied: bool) -> None:
    count = text.plural(len(plan.steps), "step")
    if plan.refused is not None:
        verdict, colour = f"refused: {plan.refused}", "red"
    elif not plan.is_needed:
        verdict, colour = "nothing to do", "green"
    elif is_applied:
        verdict, colour = f"recovered in {count}: it opens as a store that was closed", "green"
    else:
        verdict, colour = f"needs recovery, {count}; nothing was changed", "yellow"
    out.line(f"{text.printable(store)}: {out.style(text.printable(verdict), colour)}")
    length = text.size_text(plan.log_end - plan.log_start)
    did = "ends" if is_applied or not plan.is_needed else "will end"
    found = [*plan.looked_at, f"the log begins at {plan.log_start} and {did} at {plan.log_end}"]
    found[-1] += f", {length}"
    _section(out, "found", found)
    damage = [f"{s.path} at {s.offset}, {s.length} bytes: {s.reason}" for s in plan.damage]
    _section(out, "damage, which stays where it is and is passed over", damage)
    steps = [f"{number}. {step}" for number, step in enumerate(plan.steps, 1)]
    _section(out, "done" if is_applied else "to do", steps)


def _section(out: Output, title: str, lines: list[str]) -> None:
    if not lines:
        return
    out.line()
    out.line(out.style(title, "bold"))
    out.lines(f"  {text.printable(line)}" for line in lines[:_MOST_TOLD])
    if len(lines) > _MOST_TOLD:
        out.line(f"  and {len(lines) - _MOST_TOLD} more; --json has all")
