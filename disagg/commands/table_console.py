"""Where tables are printed."""

from rich.console import Console

COLUMNS_MIN = 200


def table_console() -> Console:
    """Standard output, wide enough for every table whole.

    What is wider than the terminal it folds itself: rich would cut names, addresses and paths off
    in the middle, in the 80 columns of an SSH session most of them.
    """
    columns, lines = Console().size
    # Without a height rich takes 80 columns where TERM is dumb, whatever the width.
    return Console(width=max(columns, COLUMNS_MIN), height=lines, highlight=False)
