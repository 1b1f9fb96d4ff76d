"""The live page in a real browser, over real workers: a held hand-over, then its timeline."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser import launch_arguments, why_none
from tests.process.harness import ROOT
from tests.process.served_model import ServedModel, assert_exact

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_none()), reason=why_none() or "there is a browser"),
]

BOUND_S = 60
TIMEOUT_MS = 5000 * BOUND_S
PICTURE = ROOT / "docs" / "live-page.png"
REDRAWN = """() => new Promise((done) => {
  const watched = document.getElementById("router");
  new MutationObserver(() => done()).observe(watched, { childList: true });
})"""
SIGNS = {"p": "█", "h": "▒", ".": "·", "n": "▢"}


@pytest.fixture
def page(gemma3: ServedModel) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(timeout=TIMEOUT_MS, **launch_arguments())
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(gemma3.cluster.admin_url, timeout=TIMEOUT_MS)
        page.locator("#link", has_text="live").wait_for()
        yield page
        browser.close()


def test_a_held_hand_over_is_seen_and_then_its_timeline(gemma3: ServedModel, page: Any) -> None:
    cluster, expected = gemma3.cluster, gemma3.prompt(150)
    before = gemma3.prompt(90)
    assert_exact(gemma3.ask(before, "earlier"), before)
    told = cluster.tell("d0", "hold dones")
    answer = gemma3.ask_later(expected, "seen-in-a-browser")
    cluster.wait_told("d0", "held dones", told)
    page.locator("#transfers .moving", has_text="p0 ⇒ d0").wait_for()
    page.locator("#requests button", has_text="earlier").click()
    page.locator("#request h3", has_text="Handed over by p0").wait_for()
    picture = page.screenshot(full_page=True)  # while the READs of the other are under way
    page.locator("#requests button", has_text="seen-in-a-browser").click()
    page.locator("#request h2", has_text="seen-in-a-browser").wait_for()
    cluster.tell("d0", "pass dones")
    assert_exact(answer.result(BOUND_S), expected)
    page.locator("#request h3", has_text="Handed over by p0").wait_for()
    page.locator("#transfers", has_text="no leases, no transfers").wait_for()

    record = cluster.record("seen-in-a-browser")
    (generation,) = record["generations"]
    shown = page.inner_text("#request")
    assert generation["reason"] in shown
    for group in generation["transfer"]["groups"]:
        drawn = "".join(SIGNS[sign] for sign in group["block_map"])
        assert drawn in shown.replace("\n", ""), group
    assert "·" in shown  # blocks outside the window, which did not move
    bars = page.eval_on_selector_all("#request rect", "all => all.map(one => one.textContent)")
    assert any(bar.startswith("prefill: ") for bar in bars), bars
    assert any(bar.startswith("decode: ") for bar in bars), bars
    if os.environ.get("DISAGG_TEST_PICTURES"):
        PICTURE.write_bytes(picture)


def test_a_slow_press_opens_a_request_though_the_page_is_redrawn(
    gemma3: ServedModel, page: Any
) -> None:
    prompt = gemma3.prompt(60)
    assert_exact(gemma3.ask(prompt, "pressed-slowly"), prompt)
    row = page.locator("#requests button", has_text="pressed-slowly")
    row.hover()
    page.mouse.down()
    page.evaluate(REDRAWN)
    page.evaluate(REDRAWN)  # the first may have come of an event before the press
    page.mouse.up()
    page.locator("#request h2", has_text="pressed-slowly").wait_for()
