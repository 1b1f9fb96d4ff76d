"""What a router is called at workers."""

import re
import secrets
import socket


def new_router_id(name: str) -> str:
    """An id for this life of the router: its name, or the host's, and a random epoch."""
    return f"{_name(name)}:{secrets.token_hex(8)}"


def name_of_process(name: str, number: int) -> str:
    """What one of several processes of a router is called."""
    return f"{_name(name)[:60]}-{number}"


def _name(name: str) -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63]
    return name or host or "router"
