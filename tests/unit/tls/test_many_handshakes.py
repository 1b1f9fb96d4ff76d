"""Many connect at the same time: strangers must not be able to end a process by dialling it."""

import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

from disagg.tls.certificate_files import NODE_NAME
from tests.unit.tls.strangers import create

NUM_DIALLERS = 8
NUM_EACH = 400


def dial(port: int, process: subprocess.Popen[str]) -> None:
    """Greet as a client without a certificate, again and again, while there is a server."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    for _ in range(NUM_EACH):
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 20) as plain,
                context.wrap_socket(plain, server_hostname=NODE_NAME),
            ):
                pass
        except ConnectionRefusedError:
            return
        except OSError:
            if process.poll() is not None:
                return


def test_a_port_outlives_who_dials_it(tmp_path: Path) -> None:
    """In three of four runs fewer connections ended a process that gave gRPC 1.85 its certificate
    at every handshake; `test_connections` shows that it is given once."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.unit.tls.port_process", str(create(tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        port = int(process.stdout.readline())
        diallers = [
            threading.Thread(target=dial, args=(port, process)) for _ in range(NUM_DIALLERS)
        ]
        for dialler in diallers:
            dialler.start()
        for dialler in diallers:
            dialler.join()
        process.stdin.close()
        code = process.wait(30)
    assert code == 0
