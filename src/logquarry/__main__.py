"""The process ``logquarry``, and ``python -m logquarry``."""

from __future__ import annotations

from logquarry.cli import interrupts


def main() -> None:
    """Run the command line of this process."""
    interrupts.end_at_once()
    from logquarry.cli import main as commands

    commands.main()


if __name__ == "__main__":
    main()
