"""What requests wait, asked of the routers again and again, and the counts that follow from it."""

import json
import logging
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from disagg.cluster.autoscaling import AutoscaleOptions, Autoscaling, Wait
from disagg.cluster.counts import Counts
from disagg.cluster.http_calls import call, key_header
from disagg.config import Settings, reachable_host
from disagg.config.autoscale_settings import parse_name
from disagg.errors import ConfigError
from disagg.tls.given_file import read_given

_POLL_S = 1.0
_TIMEOUT_S = 5.0
_STALE_S = 10.0
"""What a router said longer ago says nothing."""
_GONE_S = 30.0
"""An address of a name that has not answered for so long is no router, while others are."""
_AT_ONCE_MAX = 32
_ANSWER_BYTES_MAX = 8 << 20
_PATH = "/v1/disagg/queues"
KEY_FILE = "autoscale.api_key_file"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last answer of a router.

    Attributes:
        at_s: when; else since when it is asked.
        waits: by role; None: it has never answered.
    """

    at_s: float
    waits: dict[str, list[Wait]] | None = None


class LoadWatch:
    """Asks every router on threads of its own: one that does not answer holds up nobody.

    Args:
        options: of the automatic mode.
        router_urls: of the routers' admin ports; ``dns:name:port`` of one at each address.
        key_file: with a key that may observe, where there are keys; read at each call, as keys are
            replaced while routers and workers run.
    """

    def __init__(
        self, options: AutoscaleOptions, router_urls: list[str], key_file: str = ""
    ) -> None:
        self._scaling = Autoscaling(options)
        self._urls = {url: [] if parse_name(url) else [url] for url in router_urls}
        self._key_file = key_file
        self._heard: dict[str, _Heard] = {}
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
        now_s = time.monotonic()
        for urls in self._urls.values():
            answers = [self._heard.get(url, _Heard(now_s)) for url in urls]
            fresh = [one.waits for one in answers if now_s - one.at_s <= _STALE_S]
            known = [one for one in fresh if one is not None]
            num_gone = sum(now_s - one.at_s > _GONE_S for one in answers)
            if not known or len(known) + num_gone < len(urls):
                return None
            for theirs in known:
                for role, some in theirs.items():
                    waits.setdefault(role, []).extend(some)
        return waits

    def _run(self) -> None:
        while not self._closed.is_set():
            self._look_up()
            try:
                self._ask_all()
            except RuntimeError as error:  # no thread is left, for a while
                log.warning("routers are not asked what requests wait: %s", error)
            self._closed.wait(_POLL_S)

    def _ask_all(self) -> None:
        """At the same time: those that do not answer would make the others' answers old."""
        urls = sorted({url for each in self._urls.values() for url in each})
        for first in range(0, len(urls), _AT_ONCE_MAX):
            asking = [
                threading.Thread(target=self._hear, args=(url,), daemon=True)
                for url in urls[first : first + _AT_ONCE_MAX]
            ]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()

    def _look_up(self) -> None:
        """Find the addresses of names; those of one that is not known now stay."""
        found = dict(self._urls)
        for source in found:
            named = parse_name(source)
            if named is not None:
                try:
                    found[source] = _each(*named)
                    fault = ""
                except (OSError, UnicodeError) as error:
                    fault = f"{source} is not known: {error}"
                self._say(source, fault)
        urls = {url for each in found.values() for url in each}
        now_s = time.monotonic()
        self._heard = {url: self._heard.get(url, _Heard(now_s)) for url in urls}
        self._faults = {one: self._faults.get(one, "") for one in urls | found.keys()}
        self._urls = found

    def _hear(self, url: str) -> None:
        try:
            self._heard[url] = _Heard(time.monotonic(), self._ask(url))
            fault = ""
        except Exception as error:  # whatever it is: nobody would be asked any more
            fault = f"{url} does not say what requests wait: {error}"
        self._say(url, fault)

    def _say(self, source: str, fault: str) -> None:
        """Log what is new."""
        if fault and fault != self._faults.get(source) and not self._closed.is_set():
            log.warning("%s; nothing is scaled meanwhile", fault)
        self._faults[source] = fault

    def _ask(self, url: str) -> dict[str, list[Wait]]:
        asked = urllib.request.Request(url.rstrip("/") + _PATH, headers=read_key(self._key_file))
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
    read_key(autoscale.api_key_file)  # one that cannot be read is an error at the start
    return LoadWatch(options, urls, autoscale.api_key_file)


def read_key(path: str) -> dict[str, str]:
    """The header with the key of ``autoscale.api_key_file``; none where no file is set.

    Raises:
        ConfigError: the file cannot be read, or has something else.
    """
    if not path:
        return {}
    try:
        key = read_given(path)[0].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{KEY_FILE}: {path}: {reason}", param=KEY_FILE) from None
    return key_header(key, KEY_FILE)


def _each(name: str, port: int) -> list[str]:
    """A URL for each address of a name; of one kind, as a router may have an address of both."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    for family, shown in ((socket.AF_INET, "{}"), (socket.AF_INET6, "[{}]")):
        hosts = sorted({str(address[0]) for kind, *_, address in found if kind == family})
        if hosts:
            return [f"http://{shown.format(host)}:{port}" for host in hosts]
    return []


def _now_ms() -> int:
    return int(time.monotonic() * 1000)
