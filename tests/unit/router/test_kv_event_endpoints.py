"""Where KV events are published, as it is written in the router's settings."""

import pytest

from disagg.config.router_settings import RouterSettings
from disagg.errors import ConfigError
from disagg.router.kv_event_endpoints import KVEventEndpoint, parse_endpoints


def test_endpoints_are_read() -> None:
    texts = (
        "a=tcp://10.0.0.1:5557?replay=tcp://10.0.0.1:5558&tenant=t",
        "b=ipc:///run/b",
        "c=tcp://[fd00::1]:65535",
    )
    assert parse_endpoints(texts) == (
        KVEventEndpoint("a", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", "t"),
        KVEventEndpoint("b", "ipc:///run/b"),
        KVEventEndpoint("c", "tcp://[fd00::1]:65535"),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp://10.0.0.1:5557", "begins with no name"),
        ("=tcp://10.0.0.1:5557", "begins with no name"),
        ("a=10.0.0.1:5557", "neither tcp"),
        ("a=tcp://*:5557", "neither tcp"),
        ("a=tcp://10.0.0.1", "neither tcp"),
        ("a=tcp://10.0.0.1:0", "neither tcp"),
        ("a=tcp://10.0.0.1:65536", "neither tcp"),
        ("a=tcp://10.0.0.1 :5557", "neither tcp"),
        ("a=tcp://10.0.0.1:1?replay=x", "'x' is neither"),
        ("a=tcp://10.0.0.1:1?topic=x", "'topic' is none of replay, tenant"),
        ("a=tcp://10.0.0.1:1?tenant=x&tenant=y", "twice"),
    ],
)
def test_endpoints_that_cannot_be_used_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("*", r"\*")) as caught:
        parse_endpoints((text,))
    assert caught.value.param == "router.kv_event_endpoints"
    with pytest.raises(ValueError, match="kv_event_endpoints"):
        RouterSettings(kv_event_endpoints=(text,))


def test_a_name_stands_there_once() -> None:
    with pytest.raises(ConfigError, match="'a' is there twice"):
        parse_endpoints(("a=ipc:///x", "a=ipc:///y"))
