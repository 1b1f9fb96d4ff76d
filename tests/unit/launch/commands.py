"""Finds `disagg` commands in launch files and parses them as the command line would."""

import re
import shlex

from typer.main import get_command

from disagg.commands.main import app


def find_commands(line: str) -> list[list[str]]:
    """Arguments of every `disagg` call in a shell line, up to a redirection or separator."""
    found = re.findall(r"(?:^|[\s/])disagg\s+([^>&;|]+)", line)
    return [shlex.split(text) for text in found if not text.startswith(("-", "."))]


def parse_command(arguments: list[str]) -> None:
    """Parse without running.

    Raises:
        Exception: of the parser: no such command or option, or a value of the wrong type.
    """
    root = get_command(app)
    context = root.make_context("disagg", list(arguments), resilient_parsing=False)
    name, command, rest = root.resolve_command(context, arguments)  # type: ignore[attr-defined]
    command.make_context(name, rest, parent=context)
