"""What `disagg doctor` finds: what was looked at, what was seen, what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It serves, worse than it could or not for long."""
    FAULT = "fault"
    """It does not serve like this."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    subject: str
    seen: str
    advice: str = ""
    """What to do; there is some for every warning and every fault."""

    def __post_init__(self) -> None:
        assert self.advice or self.level in (Level.OK, Level.NOTE), self


def ok(subject: str, seen: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, subject, seen)


def note(subject: str, seen: str) -> Finding:
    """Worth knowing."""
    return Finding(Level.NOTE, subject, seen)


def warning(subject: str, seen: str, advice: str) -> Finding:
    """It serves, worse than it could."""
    return Finding(Level.WARNING, subject, seen, advice)


def fault(subject: str, seen: str, advice: str) -> Finding:
    """It does not serve like this."""
    return Finding(Level.FAULT, subject, seen, advice)


def has_fault(findings: Iterable[Finding]) -> bool:
    """Whether anything has to be repaired before this serves."""
    return any(one.level is Level.FAULT for one in findings)
