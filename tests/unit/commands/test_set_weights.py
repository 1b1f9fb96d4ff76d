"""`disagg revisions set` at several routers of which one does not answer."""

from typing import Any

import pytest

from disagg.commands import revisions
from disagg.errors import RemoteFault

ROUTERS = ["http://a", "http://b", "http://c"]


@pytest.mark.parametrize(
    ("down", "said"),
    [
        ("http://a", "http://a is away"),
        ("http://c", "http://c is away; set at http://a, http://b alone: say it to all again"),
    ],
)
def test_it_is_said_which_have_the_new_weights(
    monkeypatch: pytest.MonkeyPatch, down: str, said: str
) -> None:
    def call(url: str, *_: Any, **__: Any) -> dict[str, Any]:
        if url == down:
            raise RemoteFault(f"{url} is away")
        return {"revisions": []}

    monkeypatch.setattr(revisions, "call_router", call)
    with pytest.raises(RemoteFault) as found:
        revisions.set_weights(["v1=1"], ROUTERS)
    assert found.value.message == said
