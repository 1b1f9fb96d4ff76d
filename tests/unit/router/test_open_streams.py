"""Requests in progress per key."""

from contextlib import ExitStack

import pytest

from disagg.errors import CapacityError
from disagg.router.callers import Caller
from disagg.router.open_streams import OpenStreams


def caller(tenant: str, key_name: str) -> Caller:
    return Caller(tenant, key_name, frozenset())


def test_each_key_of_each_tenant_has_its_own_bound() -> None:
    streams = OpenStreams(2)
    keys = [caller("a", "x"), caller("a", "y"), caller("b", "x")]
    with ExitStack() as opened:
        for key in keys:
            opened.enter_context(streams.open(key))
            opened.enter_context(streams.open(key))
            with pytest.raises(CapacityError, match=r"limits\.streams_per_key_max"):
                streams.open(key)
            assert streams.num_open(key) == 2
    for key in keys:
        assert streams.num_open(key) == 0
        with streams.open(key):
            assert streams.num_open(key) == 1
    assert streams._keys == {}


def test_the_advised_wait_follows_the_keys_own_streams() -> None:
    now_s = 0.0
    streams = OpenStreams(3, lambda: now_s)
    key = caller("a", "x")
    with ExitStack() as opened:
        opened.enter_context(streams.open(key))
        opened.enter_context(streams.open(key))
        with streams.open(key):
            now_s = 30.0
        opened.enter_context(streams.open(key))
        with pytest.raises(CapacityError) as caught:
            streams.open(key)
    assert caught.value.retry_after_s == 10  # three that take 30 s each
