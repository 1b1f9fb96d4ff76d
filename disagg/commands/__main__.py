"""The `disagg` command: ends without a traceback also where it is interrupted while it imports."""

from disagg.commands.signals import exit_on_signals, raise_on_signals


def main() -> None:
    """Entry point: the imports take a second, in which a signal ends the process."""
    exit_on_signals()
    from disagg.commands.main import main as run

    raise_on_signals()
    run()


if __name__ == "__main__":
    main()
