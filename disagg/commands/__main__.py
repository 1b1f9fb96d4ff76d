"""`python -m disagg.commands` is the `disagg` command."""

from disagg.commands.main import main

main()
