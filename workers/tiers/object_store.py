"""Blocks as objects behind a URL: S3, Google, Azure, a directory or memory, through obstore."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from disagg.workers.tiers.options import PARAM
from disagg.workers.tiers.stored_block import (
    CONTRACT_FILE,
    StoredBlock,
    block_name,
    is_contract_name,
    parse_block_name,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Objects

DELETE_AT_ONCE = 500
LIST_AT_ONCE = 1000
OBJECTS_MAX = 1 << 24
"""Of one listing: a store that always has a next page would fill the memory."""
CONTRACT_BYTES_MAX = 1 << 20
BLOCK_BYTES_MAX = 1 << 32
"""Of any model: what is larger is no block, however it is called."""
_PROVIDERS = {
    **dict.fromkeys(("s3", "s3a"), "aws"),
    **dict.fromkeys(("az", "adl", "azure", "abfs", "abfss"), "azure"),
    "gs": "google",
}
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")


class ObjectStore:
    """All blocks under a URL, of every contract; implements `Store`.

    An object appears whole and is never changed. Requests end after ``timeout_ms``, tries
    included.

    Args:
        place: the URL; its path is in front of every object's name. Credentials come from the
            environment, as each provider's own tools take them.
        create: whether to make the directory of a ``file:`` URL.
        timeout_ms: of one request.

    Raises:
        ConfigError: obstore is not installed, or does not know the URL.
    """

    def __init__(self, place: str, *, create: bool = True, timeout_ms: int = 10_000) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(
                f"{place}: object stores need the extra disagg[object]: {error}", param=PARAM
            ) from error
        self.place = place
        self.failure: tuple[type[Exception], ...] = (BaseError, OSError)
        self._obstore = obstore
        try:
            self._objects: Objects = from_url(place, **_options(place, create, timeout_ms))
        except (BaseError, ValueError) as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> ConfigError:
        """An error of the store, for people."""
        lines = str(error).splitlines()
        return ConfigError(f"{self.place}: {lines[0] if lines else repr(error)}", param="place")

    def get(
        self, contract_name: str, name: str, most: int = BLOCK_BYTES_MAX
    ) -> "memoryview | None":
        """An object's bytes, None if there is none; raises what is in ``failure``.

        Of one with more than ``most`` bytes there are none: obstore takes memory for all that a
        store says there is, and ends the process where there is not so much.
        """
        try:
            found = self._obstore.get(self._objects, f"{contract_name}/{name}")
            return memoryview(b"" if found.meta["size"] > most else found.bytes())
        except FileNotFoundError:  # obstore's NotFoundError is one
            return None

    def put(self, contract_name: str, name: str, data: bytes) -> None:
        """Write an object whole or not at all; raises what is in ``failure``."""
        self._obstore.put(self._objects, f"{contract_name}/{name}", data, use_multipart=False)

    def delete(self, contract_name: str, names: Sequence[str]) -> None:
        """Delete objects, those of them that are there; raises what is in ``failure``."""
        paths = [f"{contract_name}/{name}" for name in names]
        for first in range(0, len(paths), DELETE_AT_ONCE):
            some = paths[first : first + DELETE_AT_ONCE]
            try:
                self._obstore.delete(self._objects, some)
            except FileNotFoundError:  # at one that is gone; the others may be there still
                for path in some:
                    with contextlib.suppress(FileNotFoundError):
                        self._obstore.delete(self._objects, path)

    # --- what anybody may ask: see `Store`

    def blocks(self) -> Iterator[StoredBlock]:
        """See `Store.blocks`."""
        firsts: set[str] = set()
        try:
            for objects in self._obstore.list(self._objects, chunk_size=LIST_AT_ONCE):
                if objects and objects[0]["path"] in firsts:
                    raise ConfigError(f"{self.place}: its listing begins anew", param="place")
                firsts.update(found["path"] for found in objects[:1])
                if len(firsts) * LIST_AT_ONCE > OBJECTS_MAX:
                    raise ConfigError(
                        f"{self.place}: its listing has more than {OBJECTS_MAX:,} objects",
                        param="place",
                    )
                for found in objects:
                    folder, _, name = found["path"].rpartition("/")
                    key = parse_block_name(name)
                    if key is not None and is_contract_name(folder):
                        used_ns = int(found["last_modified"].timestamp() * 1e9)
                        yield StoredBlock(folder, key, found["size"], used_ns)
        except self.failure as error:
            raise self.failed(error) from error

    def contract(self, contract_name: str) -> str:
        """See `Store.contract`."""
        try:
            found = self.get(contract_name, CONTRACT_FILE, CONTRACT_BYTES_MAX)
        except self.failure:
            return ""
        return bytes(found or b"").decode(errors="replace")

    def load(self, block: StoredBlock) -> bytes:
        """See `Store.load`."""
        try:
            return bytes(self.get(block.contract_name, block_name(block.key)) or b"")
        except self.failure as error:
            raise self.failed(error) from error

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        """See `Store.remove`."""
        names: dict[str, list[str]] = {}
        for block in blocks:
            names.setdefault(block.contract_name, []).append(block_name(block.key))
        try:
            for contract_name, of_contract in names.items():
                self.delete(contract_name, of_contract)
        except self.failure as error:
            raise self.failed(error) from error
        return len(blocks)

    def close(self) -> None:
        """See `Store.close`."""


def _options(place: str, create: bool, timeout_ms: int) -> dict[str, Any]:
    scheme = place.partition(":")[0]
    if scheme == "memory":
        return {}
    if scheme == "file":
        return {"mkdir": create}
    bound = timedelta(milliseconds=timeout_ms)
    return {
        "client_options": {**_from_environment(scheme), "timeout": bound, "connect_timeout": bound},
        "retry_config": {"max_retries": 2, "retry_timeout": bound},
    }


def _from_environment(scheme: str) -> dict[str, str]:
    """What the environment says of connections: obstore forgets it where options are given."""
    provider = _PROVIDERS.get(scheme, "")
    found = {name: os.environ.get(f"{provider}_{name}".upper(), "") for name in _CLIENT_OPTIONS}
    return {name: value for name, value in found.items() if provider and value}
