"""Web pages of other origins: which may call, what they may read, and that no other may."""

import json

import pytest

from disagg.config.settings import Settings
from disagg.errors import ConfigError
from disagg.router.app import RouterApp
from disagg.router.keys import hash_of, new_key
from disagg.router.options import RouterOptions, check_origins
from tests.unit.router.conftest import ROUTER

PAGE, OTHER = "https://chat.example", "https://chat.example.evil"
BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 3}
COMPLETIONS = "/v1/completions"
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os, bad name",
}
CORS = "access-control-"


def cors(answer):
    return {name: value for name, value in answer.headers.items() if name.startswith(CORS)}


@pytest.fixture
async def keyed(open_house):
    """A router with keys that lets two origins in, and a key of a client's."""
    key = new_key()
    entry = {"name": "one", "tenant": "alice", "sha256": hash_of(key), "scopes": ["serve"]}
    house = await open_house(
        api_keys=json.dumps({"keys": [entry]}), cors_origins=(PAGE, "http://localhost:3000")
    )
    await house.add()
    house.key = {"Authorization": f"Bearer {key}"}
    return house


async def test_a_preflight_needs_no_key_and_says_what_is_allowed(keyed):
    for path in (COMPLETIONS, "/nothing"):  # strangers learn of no page
        answer = await keyed.http.options(path, headers=ASKS)
        assert answer.status_code == 204
        assert answer.content == b""
        assert answer.headers["access-control-allow-origin"] == PAGE
        allowed = answer.headers["access-control-allow-headers"].split(", ")
        assert {"authorization", "content-type", "x-request-id", "x-api-key"} < set(allowed)
        assert "x-stainless-os" in allowed
        assert "bad name" not in allowed
        assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST"
        assert "Origin" in answer.headers.get_list("vary")
        assert "access-control-allow-credentials" not in answer.headers


async def test_a_preflight_is_a_last_answer_too_where_the_router_leaves_its_port(keyed):
    answer = await keyed.http.options(COMPLETIONS, headers=ASKS)
    assert "connection" not in answer.headers
    keyed.app._http_server.is_leaving = True
    answer = await keyed.http.options(COMPLETIONS, headers=ASKS)
    assert (answer.status_code, answer.headers["connection"]) == (204, "close")


async def test_every_answer_tells_the_page_that_it_may_read_it(keyed):
    headers = {"Origin": PAGE} | keyed.key
    whole = await keyed.http.post(COMPLETIONS, json=BODY, headers=headers)
    stream = await keyed.http.post(COMPLETIONS, json=BODY | {"stream": True}, headers=headers)
    wrong = await keyed.http.post(COMPLETIONS, json=BODY | {"n": 0}, headers=headers)
    stranger = await keyed.http.post(COMPLETIONS, json=BODY, headers={"Origin": PAGE})
    missing = await keyed.http.get("/nothing", headers=headers)
    answers = (whole, stream, wrong, stranger, missing)
    assert [one.status_code for one in answers] == [200, 200, 400, 401, 404]
    assert stream.text.endswith("data: [DONE]\n\n")
    for answer in answers:
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "Origin"
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"X-Request-Id", "Retry-After"} < set(exposed)


async def test_other_origins_get_no_permission(keyed):
    for origin in (OTHER, "http://chat.example", "https://chat.example:8443", "null", ""):
        asked = await keyed.http.options(COMPLETIONS, headers=ASKS | {"Origin": origin})
        assert asked.status_code == 401
        assert cors(asked) == {}
        answer = await keyed.http.post(
            COMPLETIONS, json=BODY, headers={"Origin": origin} | keyed.key
        )
        assert cors(answer) == {}
        assert answer.headers["vary"] == "Origin"  # a cache must not give it to the page
    no_preflight = await keyed.http.options(COMPLETIONS, headers={"Origin": PAGE})
    assert no_preflight.status_code == 401


async def test_the_admin_port_takes_no_pages(keyed):
    for method, path in (("OPTIONS", "/metrics"), ("GET", "/health"), ("GET", "/metrics")):
        answer = await keyed.admin.request(method, path, headers=ASKS)
        assert cors(answer) == {}
        assert answer.status_code in (200, 401)


async def test_a_star_lets_every_page_in(open_house):
    house = await open_house(cors_origins=("*",))
    answer = await house.http.get("/v1/models", headers={"Origin": OTHER})
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "vary" not in answer.headers
    asked = await house.http.options(COMPLETIONS, headers=ASKS | {"Origin": OTHER})
    assert asked.headers["access-control-allow-origin"] == "*"


async def test_without_the_setting_there_are_no_such_headers(house):
    answer = await house.http.get("/v1/models", headers={"Origin": PAGE})
    assert cors(answer) == {}
    assert "vary" not in answer.headers
    asked = await house.http.options(COMPLETIONS, headers=ASKS)
    assert asked.status_code == 405
    assert cors(asked) == {}


BAD = [
    "chat.example",
    "https://chat.example/",
    "https://chat.example/app",
    "https://Chat.example",
    "https://*.example",
    "https://user@chat.example",
    "https://chat.example:443",
    "http://localhost:80",
    "http://localhost:0",
    "https://chat.example\r\nx: y",
    "null",
    "",
]
GOOD = [PAGE, "http://localhost:3000", "http://[::1]:8080", "chrome-extension://abcdef", "*"]


@pytest.mark.parametrize("origin", BAD)
def test_a_bad_origin_is_refused_at_the_start(origin, model_dir):
    with pytest.raises(ValueError, match=r"router(\.|\n).*cors_origins"):
        Settings.model_validate({"router": {"cors_origins": [origin]}})
    with pytest.raises(ConfigError) as refused:
        RouterApp(RouterOptions(str(model_dir), "tiny", **ROUTER, cors_origins=(origin,)))
    assert refused.value.param == "router.cors_origins"


@pytest.mark.parametrize("origin", GOOD)
def test_a_good_origin_is_taken(origin):
    settings = Settings.model_validate({"router": {"cors_origins": [origin]}})
    assert settings.router.cors_origins == (origin,)


def test_a_star_stands_alone():
    with pytest.raises(ConfigError, match="no other"):
        check_origins(("*", PAGE))
