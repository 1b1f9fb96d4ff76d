"""The live page in a real browser: what it shows, whom it lets in, what it never does."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest

from disagg.testing.scripted_worker import READY
from tests.browser import launch_arguments, why_none
from tests.unit.router.scripted_worker import BOUND_S
from tests.unit.router.test_callers import FILE, KEYS, PROMPT, ask
from tests.unit.router.test_overview import answer_of

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none() or "there is a browser")

TIMEOUT_MS = 5000 * BOUND_S


class Tab:
    """A page of the browser, and everything that it asked for or complained of."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._said)
        page.set_default_timeout(TIMEOUT_MS)

    def _said(self, message: Any) -> None:
        if message.type == "error" and "status of 40" not in message.text:
            self.complaints.append(message.text)

    async def text(self, selector: str) -> str:
        return str(await self.page.inner_text(selector))

    async def wait(self, selector: str, text: str) -> None:
        """Until a part of the page has a text."""
        await self.page.locator(selector, has_text=text).first.wait_for(timeout=TIMEOUT_MS)


@pytest.fixture
async def open_tab():
    """Open the page of a house in a tab of its own."""
    from playwright.async_api import async_playwright

    async with contextlib.AsyncExitStack() as stack:
        playwright = await stack.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(timeout=TIMEOUT_MS, **launch_arguments())
        stack.push_async_callback(browser.close)

        async def build(house) -> Tab:
            context = await browser.new_context()
            tab = Tab(await context.new_page())
            context.set_default_navigation_timeout(TIMEOUT_MS)
            await tab.page.goto(f"http://127.0.0.1:{house.app.admin_port}/")
            return tab

        yield build


async def test_fleet_pools_transfers_and_a_requests_timeline(open_house, open_tab):
    house = await open_house()
    busy = replace(READY, num_waiting=2, num_running=1, num_prefill_tokens_queued=9)
    worker = await house.add("w1", stats=busy)
    worker.status = answer_of(worker)
    tab = await open_tab(house)
    await tab.wait("#link", "live")
    card = await tab.text("#workers .card")
    for said in ("w1", "ready", "running 1, waiting 2, 9 tokens to prefill", "100 of 100 blocks"):
        assert said in card
    signs = await tab.text("#workers .map")
    assert (signs.count("█"), signs.count("▒"), len(signs)) == (3, 1, 40)  # 7 and 2 of 100
    assert "other → w1" in await tab.text("#transfers") or "⇒" in await tab.text("#transfers")
    assert (await tab.page.inner_text("#transfers .moving")) == "other ⇒ w1"

    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
    await house.http.post("/v1/completions", json=body, headers={"x-request-id": "mine/1"})
    await tab.page.click("text=mine/1")
    await tab.wait("#request h2", "Request mine/1")
    record = (await house.admin.get("/v1/disagg/requests/mine%2F1")).json()
    shown = await tab.text("#request")
    assert record["generations"][0]["reason"] in shown
    assert "Plan 1: w1" in shown
    assert await tab.page.locator("#request svg text", has_text="w1").count() == 1

    worker.stats = replace(busy, num_waiting=5)
    await worker.end_sessions()  # it registers again, and the page follows by itself
    await tab.wait("#workers", "no workers")
    await worker.register(house.app.grpc_port)
    await tab.wait("#workers .card", "waiting 5")
    assert tab.complaints == []
    port = house.app.admin_port
    assert all(url.startswith(f"http://127.0.0.1:{port}/") for url in tab.asked)


async def test_a_key_is_asked_for_kept_in_the_tab_and_in_no_address(open_house, open_tab):
    house = await open_house(api_keys=FILE)
    worker = await house.add(prompt=len(PROMPT))
    worker.status = answer_of(worker)
    await ask(house, "alice", "hers")
    tab = await open_tab(house)
    await tab.page.wait_for_selector("#door:not([hidden])")
    assert not await tab.page.is_visible("#all")
    await tab.page.fill("#key", KEYS["bob"])  # it may not observe
    await tab.page.click("#door button")
    await tab.wait("#refusal", "this API key is not for")
    await tab.page.fill("#key", KEYS["root"])
    await tab.page.click("#door button")
    await tab.wait("#requests", "hers")
    assert not await tab.page.is_visible("#door")
    await tab.page.click("text=hers")
    await tab.wait("#request h2", "Request hers")
    assert all(KEYS["root"] not in url for url in [*tab.asked, tab.page.url])
    stored = await tab.page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
    assert stored == [{"disagg-key": KEYS["root"]}, {}, ""]
    await tab.page.reload()
    await tab.wait("#requests", "hers")

    kept = json.loads(FILE)
    kept["keys"] = [one for one in kept["keys"] if one["name"] != "root"]
    house.app._keys.ring.replace(json.dumps(kept).encode())
    await tab.page.wait_for_selector("#door:not([hidden])")
    assert await tab.page.evaluate("({...sessionStorage})") == {}
    assert "hers" not in await tab.text("body")
    assert tab.complaints == []


async def test_what_comes_from_outside_stays_text_and_no_script_of_others_runs(
    open_house, open_tab
):
    house = await open_house()
    worker = await house.add("w1", revision="r1")
    hostile = "<img src=x onerror=document.title='taken'>"
    worker.status = answer_of(worker, version=hostile, lease_of=hostile)
    tab = await open_tab(house)
    await tab.wait("#workers", hostile)
    assert await tab.page.locator("img").count() == 0
    added = await tab.page.evaluate(
        """() => new Promise((resolve) => {
          document.addEventListener(
            "securitypolicyviolation", (e) => resolve(e.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "document.title = 'taken'";
          document.head.append(script);
          if (document.title === "taken") resolve("it ran");
        })"""
    )
    assert added.startswith("script-src")
    assert "taken" not in await tab.page.title()


async def test_a_router_that_comes_back_is_followed_again(open_house, open_tab):
    house = await open_house()
    worker = await house.add()
    worker.status = answer_of(worker)
    tab = await open_tab(house)
    await tab.wait("#link", "live")
    await tab.page.route("**/v1/disagg/events", lambda route: route.abort())
    house.app._admin._live.close()
    await tab.wait("#link", "trying again")
    house.app._admin._live._closed = asyncio.Event()
    await tab.page.unroute("**/v1/disagg/events")
    await tab.wait("#link", "live")
