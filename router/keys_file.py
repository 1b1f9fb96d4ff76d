"""Where a router's API keys come from, and how a changed file takes effect without a restart."""

import asyncio
import logging
from pathlib import Path

from disagg.errors import ConfigError
from disagg.router.keys import KeyRing
from disagg.router.options import RouterOptions
from disagg.tls.given_file import read_given

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the file. It is read each time: mounted secrets are replaced by links, and
times of change are as coarse as their file system."""


class KeysFile:
    """Fills a key ring from the options, and keeps it as the file is.

    Attributes:
        ring: whose key is whose, now.
    """

    def __init__(self, options: RouterOptions) -> None:
        """Read the keys.

        Raises:
            ConfigError: they cannot be used.
        """
        self._path = Path(options.api_keys_file) if options.api_keys_file else None
        self._seen: bytes | None = None
        self._fault = ""
        self.ring = KeyRing(is_open=self._path is None and not options.api_keys)
        if self._path is not None and (fault := self._look(self._path)):
            raise ConfigError(fault, param="router.api_keys_file")
        if options.api_keys:
            self.ring.replace(options.api_keys.encode())

    async def watch(self) -> None:
        """Follow the file's changes for ever; to be called only where there is one.

        A file that cannot be used, or is not there any more, changes nothing: who had a key before
        has it still. Each such state is logged once.
        """
        assert self._path is not None
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                fault = await asyncio.to_thread(self._look, self._path)
            except RuntimeError as error:  # no thread is left, for a while
                fault = f"{self._path}: {error}"
            if fault and fault != self._fault:
                logger.error("%s: the former API keys stay in use", fault)
            self._fault = fault

    def _look(self, path: Path) -> str:
        """Take the keys of a file that has changed; what is wrong with it, "" if nothing new is."""
        try:
            data, _ = read_given(path)
            if data != self._seen:
                self._seen = data
                logger.info("%s: %d API keys", path, self.ring.replace(data))
        except ConfigError as error:
            return f"{path}: {error.message}"
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return ""
