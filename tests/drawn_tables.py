"""Tables of the documents that are drawn from the code, each between two marks.

``DISAGG_REWRITE_TABLES=1`` writes what is drawn now into the documents; review the diff.
"""

import os
from pathlib import Path

END = "<!-- end -->"


def check_drawn(document: Path, name: str, table: str) -> None:
    """Hold a document's part between the marks of ``name`` against the table drawn now."""
    text, start = document.read_text(), f"<!-- drawn: {name} -->\n"
    before, mark, rest = text.partition(start)
    assert mark, f"{document} has no {start.strip()}"
    found, end, after = rest.partition(END)
    assert end, f"{document}: {start.strip()} has no {END}"
    if os.environ.get("DISAGG_REWRITE_TABLES") == "1":
        document.write_text(before + mark + table + END + after)
        return
    assert found == table, (
        f"{document.name}, table {name}, differs; DISAGG_REWRITE_TABLES=1 writes this:\n{table}"
    )
