"""What a router is called at workers."""

import re
import secrets
import socket


def new_router_id(name: str) -> str:
    """An id for this life of the router: its name, or the host's, and a random epoch."""
    name = name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:63]
    return f"{name or 'router'}:{secrets.token_hex(8)}"
