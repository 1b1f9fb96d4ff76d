"""What a router gets of the process that keeps it running: its sockets, and who it tells."""

import contextlib
import os
import socket
from dataclasses import dataclass

from disagg.errors import ConfigError

BOUND = b"bound\n"
"""It has its ports, and its settings are of use."""
SERVING = b"serving\n"
"""It accepts connections, and every role wanted has been there."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """File descriptors of a router's process.

    Attributes:
        http: socket of the clients' port, bound.
        admin: of the operators' port.
        tells: end of a pipe, which takes `BOUND` and `SERVING`.
        waits: another router serves on these sockets: accept nothing before this one is ready.
    """

    http: int
    admin: int
    tells: int
    waits: bool

    def to_text(self) -> str:
        """As an argument of a command."""
        return f"{self.http},{self.admin},{self.tells},{int(self.waits)}"

    @staticmethod
    def from_text(text: str) -> "Inherited":
        """From an argument of a command.

        Raises:
            ConfigError: it is none.
        """
        try:
            http, admin, tells, waits = map(int, text.split(","))
        except ValueError as error:
            raise ConfigError(f"{text!r} is not four numbers", param="--inherited") from error
        return Inherited(http, admin, tells, bool(waits))

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """Of the clients' port and the operators'."""
        return socket.socket(fileno=self.http), socket.socket(fileno=self.admin)

    def tell(self, word: bytes) -> None:
        """Say how far this router is; nothing where nobody listens any more."""
        with contextlib.suppress(OSError):
            os.write(self.tells, word)
