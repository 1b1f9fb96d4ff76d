"""What a router gets of the process that keeps it running: its sockets, and who it tells."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import ConfigError

BOUND = b"bound\n"
"""It has its ports, and its settings are of use."""
SERVING = b"serving\n"
"""It accepts connections, and every role wanted has been there."""
BEAT = b"."
"""Its event loop runs; said every `BEAT_S` from `SERVING` on."""
BEAT_S = 1.0
SOCKET_SUFFIX = ".sock"


def sibling_socket(folder: Path, pid: int) -> Path:
    """Where a router's process of this folder is found by the others."""
    return folder / f"{pid}{SOCKET_SUFFIX}"


@dataclass(frozen=True, slots=True)
class Inherited:
    """File descriptors of a router's process.

    Attributes:
        http: socket of the clients' port, bound.
        admin: of the operators' port.
        tells: end of a pipe, which takes `BOUND`, `SERVING` and `BEAT`; a full one blocks nobody.
        waits: another router serves on these ports: accept nothing before this one is ready.
        number: among the processes that share the ports.
        folder: where these find each other; "": there is one alone.
    """

    http: int
    admin: int
    tells: int
    waits: bool
    number: int = 0
    folder: str = ""

    def to_text(self) -> str:
        """As an argument of a command."""
        numbers = self.http, self.admin, self.tells, int(self.waits), self.number
        return ",".join(map(str, (*numbers, self.folder)))

    @staticmethod
    def from_text(text: str) -> "Inherited":
        """From an argument of a command.

        Raises:
            ConfigError: it is none.
        """
        try:
            *numbers, folder = text.split(",", 5)
            http, admin, tells, waits, number = map(int, numbers)
        except ValueError as error:
            fault = f"{text!r} is not five numbers and a folder"
            raise ConfigError(fault, param="--inherited") from error
        return Inherited(http, admin, tells, bool(waits), number, folder)

    def sockets(self) -> tuple[socket.socket, socket.socket]:
        """Of the clients' port and the operators'."""
        return socket.socket(fileno=self.http), socket.socket(fileno=self.admin)

    def tell(self, word: bytes) -> bool:
        """Say how far this router is; False where nobody listens any more."""
        with contextlib.suppress(OSError):
            return bool(os.write(self.tells, word))
        return False
