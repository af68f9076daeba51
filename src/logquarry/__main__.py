"""The entry point of the program ``logquarry`` and of ``python -m logquarry``."""

import os

try:
    from logquarry.cli import interrupts
except KeyboardInterrupt:
    # Ctrl-C arrived during the import above, before the command line could handle it. To keep this
    # time short, the module `interrupts` is imported before all others.
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line of this process."""
    interrupts.end_at_once()
    from logquarry.cli import main as commands

    commands.main()


if __name__ == "__main__":
    main()
