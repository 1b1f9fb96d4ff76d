"""Workers of an older and of a newer release serve together with this one; one of another wire
version is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.messages.registration import WIRE_MAX, WIRE_MIN
from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.harness import MODEL, wait_until
from tests.process.replicas import Replicas, Router, running
from tests.process.served_model import GAP_MIN, WINDOW

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    folder = tmp_path_factory.mktemp("releases")
    model_dir = make_checkpoint(folder / "gemma3", "gemma3", window=WINDOW)
    modules = {
        "older-p": "tests.process.older_release",
        "newer-d": "tests.process.newer_release",
        "future": "tests.process.future_release",
    }
    releases = Replicas(model_dir, folder, {"worker_silent_ms": 60_000}, modules=modules)
    roles = {"older-p": "prefill", "newer-d": "decode"}
    with running(releases, "a", **roles) as replicas:
        yield replicas


def prompt_of(model_dir: Path, salt: int) -> tuple[list[int], list[int]]:
    """A prompt whose continuation by plain transformers is clear, and that continuation."""
    for attempt in range(50):
        prompt = [7 + (salt * 13 + attempt * 17 + i * i) % 90 for i in range(70)]
        token_ids, _, gap = reference_generate(model_dir, prompt, NUM_TOKENS)
        if gap > GAP_MIN:
            return prompt, list(token_ids)
    raise AssertionError("no clear prompt")


def answered(router: Router, prompt: list[int], request_id: str) -> list[int]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = router.http.post(
        "/v1/completions",
        json=body | {"ignore_eos": True, "return_token_ids": True},
        headers={"X-Request-Id": request_id},
    )
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


def test_a_prompt_goes_from_an_older_release_to_a_newer_one(fleet: Replicas) -> None:
    router = fleet.routers["a"]
    known = router.workers()
    spoken = {name: view["info"]["contract"]["wire_max"] for name, view in known.items()}
    assert spoken == {"older-p": WIRE_MAX, "newer-d": WIRE_MAX + 1}
    assert not known["older-p"]["info"]["takes_drain"], "it does not say what it does not know"
    for salt in range(3):
        prompt, expected = prompt_of(fleet.model_dir, salt)
        assert answered(router, prompt, f"r{salt}") == expected
        (generation,) = router.record(f"r{salt}")["generations"]
        assert generation["prefill"]["worker_id"] == "older-p"
        assert generation["decode"]["worker_id"] == "newer-d"
        assert generation["transfer"]["groups"], "its KV was pulled"


def test_it_goes_on_when_one_of_them_ends(fleet: Replicas) -> None:
    """The newer one drains, and the older one alone serves; it does not know a drain itself."""
    router = fleet.routers["a"]
    told = router.admin.put("/v1/disagg/drain", json={"name": "older-p"})
    assert told.status_code == 400
    assert "too old" in told.json()["error"]["message"]
    told = router.admin.put("/v1/disagg/drain", json={"name": "newer-d", "timeout_ms": 5_000})
    assert told.status_code == 200, told.text
    wait_until(lambda: "newer-d" not in router.workers(), "the newer one to end")
    prompt, expected = prompt_of(fleet.model_dir, 9)
    assert answered(router, prompt, "alone") == expected


def test_a_release_of_another_wire_version_is_refused(fleet: Replicas) -> None:
    """Control: it is the range that counts, not the fields."""
    fleet.roles["future"] = "both"
    fleet.start_worker("future")
    far = WIRE_MAX + 1
    why = f"worker future speaks wire versions {far} to {far}, this router {WIRE_MIN} to {WIRE_MAX}"
    wait_until(lambda: why in fleet.workers["future"].logged(), "the refusal")
    assert "future" not in fleet.routers["a"].workers()
