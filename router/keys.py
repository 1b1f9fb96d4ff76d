"""API keys: how a file keeps them, hashed, and whose key a request shows."""

import hmac
import re
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator

from disagg.errors import ConfigError
from disagg.router.callers import ANYBODY, SCOPES, Caller, UnauthenticatedError

KEYS_MAX = 1024
"""Each request is compared with all of them: 0.1 ms."""
TENANTS_MAX = 128
"""Each is a label of metrics."""
KEY = re.compile(r"disagg-[A-Za-z0-9_-]{43}")
"""What `new_key` makes: 256 random bits, so that one sha256 keeps them. No other is looked at."""
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]


class KeyEntry(BaseModel):
    """One key as the file has it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Name
    tenant: Name
    scopes: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    """Of the whole key, in hexadecimal."""
    created: str = ""

    @model_validator(mode="after")
    def _check(self) -> "KeyEntry":
        if unknown := sorted(set(self.scopes) - SCOPES):
            raise ValueError(f"scopes: {unknown[0]!r} is none of {', '.join(sorted(SCOPES))}")
        return self


class KeyFile(BaseModel):
    """What a file of keys holds; an empty list lets nobody in."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    keys: Annotated[tuple[KeyEntry, ...], FailFast(), Field(strict=False, max_length=KEYS_MAX)]
    # Of a file that has nothing right the faults would take a thousand times its memory.

    @model_validator(mode="after")
    def _check(self) -> "KeyFile":
        for what, values in (
            ("name", [key.name for key in self.keys]),
            ("sha256", [key.sha256 for key in self.keys]),
        ):
            twice = {value for value in values if values.count(value) > 1}
            if twice:
                names = [key.name for key in self.keys if getattr(key, what) in twice]
                raise ValueError(f"keys: {' and '.join(names[:2])} have the same {what}")
        if len({key.tenant for key in self.keys}) > TENANTS_MAX:
            raise ValueError(f"keys: more than {TENANTS_MAX} tenants")
        return self


def new_key() -> str:
    """A key nobody has had before; only who asked for it ever sees it."""
    return f"disagg-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return sha256(key.encode()).hexdigest()


def parse_keys(data: bytes) -> KeyFile:
    """Check the contents of a file of keys.

    Raises:
        ConfigError: naming the entry and field at fault, and no value.
    """
    try:
        return KeyFile.model_validate_json(data)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['msg'].removeprefix('Value error, ')}"
            for detail in error.errors(include_input=False, include_url=False)
        ]
        told = "; ".join(fault.removeprefix(": ") for fault in faults[:3])
        # Not "from error": its text has the values.
        raise ConfigError(f"not a file of API keys: {told}", param="router.api_keys") from None


@dataclass(slots=True)
class KeyRing:
    """The keys that open this router now.

    Attributes:
        is_open: there are none, and whoever comes is `ANYBODY`.
    """

    is_open: bool
    _callers: tuple[tuple[bytes, Caller], ...] = field(default=(), repr=False)

    def replace(self, data: bytes) -> int:
        """Take the keys of a file's contents instead of the former ones.

        Returns:
            How many there are.

        Raises:
            ConfigError: they cannot be used; the former ones stay.
        """
        self._callers = tuple(
            (bytes.fromhex(key.sha256), Caller(key.tenant, key.name, frozenset(key.scopes)))
            for key in parse_keys(data).keys
        )
        return len(self._callers)

    def caller(self, key: str) -> Caller:
        """Whose key it is.

        Raises:
            UnauthenticatedError: there is none, or it is not known (any more).
        """
        found = self.find(key)
        if found is None:
            raise self.refusal(key)
        return found

    def refusal(self, key: str) -> UnauthenticatedError:
        """What is told to who shows a key that is not known, or none."""
        return UnauthenticatedError(
            "this API key is not known"
            if key
            else "an API key is needed: Authorization: Bearer KEY"
        )

    def find(self, key: str) -> Caller | None:
        """The same, None where it is not known."""
        if self.is_open:
            return ANYBODY
        if KEY.fullmatch(key) is None:
            return None
        digest = sha256(key.encode()).digest()
        found = None
        for kept, caller in self._callers:  # all of them: the time tells nothing of which
            if hmac.compare_digest(kept, digest):
                found = caller
        return found
