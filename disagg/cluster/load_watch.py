"""What requests wait, asked of the routers again and again, and the counts that follow from it."""

import http.client
import json
import logging
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from disagg.cluster.autoscaling import AutoscaleOptions, Autoscaling, Wait
from disagg.cluster.counts import Counts
from disagg.cluster.http_calls import call, key_header
from disagg.config import Settings, reachable_host
from disagg.errors import ConfigError

_POLL_S = 1.0
_TIMEOUT_S = 5.0
_STALE_S = 10.0
"""What a router said longer ago says nothing."""
_ANSWER_BYTES_MAX = 8 << 20
_PATH = "/v1/disagg/queues"
KEY_FILE = "autoscale.api_key_file"

log = logging.getLogger(__name__)


class LoadWatch:
    """Asks every router on a thread of its own: one that does not answer holds up nobody.

    Args:
        options: of the automatic mode.
        router_urls: of the routers' admin ports; a name may stand for several.
        api_key: that may observe; "" where there are no keys.
    """

    def __init__(self, options: AutoscaleOptions, router_urls: list[str], api_key: str) -> None:
        self._scaling = Autoscaling(options)
        self._named_urls = router_urls
        self._router_urls = router_urls
        self._headers = key_header(api_key, KEY_FILE)
        self._heard: dict[str, tuple[float, dict[str, list[Wait]]]] = {}
        self._faults: dict[str, str] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="load watch", daemon=True).start()

    def close(self) -> None:
        """Ask no router any more."""
        self._closed.set()

    def decide(self, counts: Counts, serving: Mapping[str, str]) -> tuple[Counts, str]:
        """How many workers are wanted now, and why.

        Args:
            counts: wanted so far.
            serving: role by id of the workers that serve.
        """
        decided = self._scaling.decide(_now_ms(), counts, Counter(serving.values()), self._waits())
        return decided, "; ".join(self._scaling.reasons.values())

    def _waits(self) -> dict[str, list[Wait]] | None:
        """Of all routers, by role; None while one of them has not answered lately."""
        waits: dict[str, list[Wait]] = {}
        for url in self._router_urls:
            heard_s, found = self._heard.get(url, (float("-inf"), {}))
            if time.monotonic() - heard_s > _STALE_S:
                return None
            for role, theirs in found.items():
                waits.setdefault(role, []).extend(theirs)
        return waits

    def _run(self) -> None:
        while not self._closed.is_set():
            self._router_urls = [one for url in self._named_urls for one in _each(url)]
            for left in self._faults.keys() - set(self._router_urls):
                self._heard.pop(left, None)
                del self._faults[left]
            for url in self._router_urls:
                try:
                    self._heard[url] = time.monotonic(), self._ask(url)
                    fault = ""
                except (
                    OSError,
                    http.client.HTTPException,
                    ValueError,
                    RecursionError,
                    KeyError,
                    TypeError,
                ) as error:
                    fault = f"{url} does not say what requests wait: {error}"
                if fault and fault != self._faults.get(url):
                    log.warning("%s; nothing is scaled meanwhile", fault)
                self._faults[url] = fault
            self._closed.wait(_POLL_S)

    def _ask(self, url: str) -> dict[str, list[Wait]]:
        asked = urllib.request.Request(url.rstrip("/") + _PATH, headers=self._headers)
        told = json.loads(call(asked, _TIMEOUT_S, _ANSWER_BYTES_MAX))
        now_ms = _now_ms()
        found: dict[str, list[Wait]] = {}
        for one in told["waits"]:
            wait = Wait(now_ms - int(one["age_ms"]), int(one["waited_ms"]))
            found.setdefault(str(one["role"]), []).append(wait)
        return found


def watch_load(settings: Settings) -> LoadWatch | None:
    """Begin to watch, if the settings want the automatic mode.

    Raises:
        ConfigError: the key's file cannot be read.
    """
    autoscale, router = settings.autoscale, settings.router
    if not autoscale.ranges:
        return None
    options = AutoscaleOptions(
        ranges=autoscale.ranges,
        target_queue_ms=autoscale.target_queue_ms,
        up_after_ms=autoscale.up_after_ms,
        down_after_ms=autoscale.down_after_ms,
    )
    host = reachable_host(router.admin_host)
    own = [f"http://{host}:{router.admin_port + number}" for number in range(router.processes)]
    urls = list(autoscale.router_urls) or own
    return LoadWatch(options, urls, read_key(autoscale.api_key_file))


def read_key(path: str) -> str:
    """The key of ``autoscale.api_key_file``; "" where none is set.

    Raises:
        ConfigError: the file cannot be read, or has something else.
    """
    if not path:
        return ""
    try:
        key = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY_FILE}: {path}: {error}", param=KEY_FILE) from None
    key_header(key, KEY_FILE)
    return key


def _each(url: str) -> list[str]:
    """One URL for each address of its host, where there are several, as of a headless Service.

    Of one kind: a host that has both is one. With https it stays, as the certificate is the name's.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return [url]
    port = parts.port or 80
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [url]
    for family, shown in ((socket.AF_INET, "{}"), (socket.AF_INET6, "[{}]")):
        hosts = sorted({str(address[0]) for kind, *_, address in found if kind == family})
        if len(hosts) > 1:
            return [f"http://{shown.format(host)}:{port}{parts.path}" for host in hosts]
    return [url]


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
