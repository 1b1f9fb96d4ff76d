"""How many files and connections a process may have open."""

import resource

UNLIMITED = resource.RLIM_INFINITY
FILES_MAX = 1 << 16
"""Nobody here needs more, and some programs that are started close every one that could be open."""

USUAL = 1024
"""Most systems begin with so many, and all here starts with them."""


def allow_files() -> int:
    """Let this process have as many files open as it may: most systems begin with 1,024.

    Returns:
        How many it may have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = files_within(soft, hard)
    if soft != UNLIMITED and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return num_files


def files_within(soft: int, hard: int) -> int:
    """How many `allow_files` gets by these limits of the system."""
    asked = FILES_MAX if hard == UNLIMITED else min(FILES_MAX, hard)
    return asked if soft == UNLIMITED else max(soft, asked)


def files_left(num_taken: int) -> int:
    """How many of the files that this process may have open one of its ports may take.

    Half of what is left beside ``num_taken``: the rest is for the connections that it makes, and
    all else.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = FILES_MAX if soft == UNLIMITED else soft
    return max(num_files // 4, (num_files - num_taken) // 2)


def why_few_files() -> str:
    """Behind an error of a library that does not say what it lacks; "" where files are enough."""
    num_files = files_within(*resource.getrlimit(resource.RLIMIT_NOFILE))
    if num_files >= USUAL:
        return ""
    return f"; this process may have only {num_files} files open (ulimit -Hn), allow {USUAL:,}"


def tight_limits() -> str:
    """Behind an error that may come of the system's limits: those that this process has.

    Ray's processes end without a word by them; "" where there are none.
    """
    files, memory = (
        resource.getrlimit(of)[0] for of in (resource.RLIMIT_FSIZE, resource.RLIMIT_AS)
    )
    said = why_few_files()
    if files != UNLIMITED:
        said += f"; no file here may have more than {files:,} bytes (ulimit -f)"
    if memory != UNLIMITED:
        said += f"; no process here may map more than {memory:,} bytes (ulimit -v)"
    return said
