"""A new checkpoint is rolled in beside the old one, in real processes and under load."""

import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.checkpoints import make_checkpoint, reference_generate
from tests.process.harness import MODEL, START_S, WAIT_S, wait_until
from tests.process.replicas import Replicas, Router, collect, running, stream
from tests.process.served_model import GAP_MIN, WINDOW

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 8
NUM_PROMPTS = 5
NEW_CONTRACT: dict[str, Any] = {"block_tokens": 32, "max_model_tokens": 512}
"""Of the workers that come: other blocks, and so other hashes; shorter requests."""
PATH = "/v1/disagg/revisions"


@dataclass(frozen=True)
class Question:
    """A prompt about whose continuation both checkpoints are clear, and differ."""

    prompt: list[int]
    texts: dict[str, str]
    """By checkpoint."""


@dataclass
class Checkpoints:
    old: Path
    new: Path
    questions: list[Question] = field(default_factory=list)

    def body(self, number: int) -> dict[str, Any]:
        """The request of a question; greedy."""
        question = self.questions[number % len(self.questions)]
        return {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
        }

    def text(self, number: int, revision: str) -> str:
        """What plain transformers answers."""
        return self.questions[number % len(self.questions)].texts[revision]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    old, new = (
        make_checkpoint(folder / name, "gemma3", window=WINDOW, seed=seed)
        for name, seed in (("old", 0), ("new", 1))
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(old)
    made = Checkpoints(old, new)
    for salt in range(200):
        if len(made.questions) == NUM_PROMPTS:
            break
        prompt = [7 + (salt * 13 + i * i) % 90 for i in range(70 + salt % 7)]
        texts, gaps = {}, []
        for name, directory in (("old", old), ("new", new)):
            token_ids, _, gap = reference_generate(directory, prompt, NUM_TOKENS)
            texts[name] = tokenizer.decode(token_ids)
            gaps.append(gap)
        if min(gaps) >= GAP_MIN and texts["old"] != texts["new"]:
            made.questions.append(Question(prompt, texts))
    assert len(made.questions) == NUM_PROMPTS
    return made


@dataclass(frozen=True)
class Served:
    request_id: str
    number: int
    phase: str
    """That was set before it was sent."""
    text: str


class Load:
    """Clients that ask without a pause, each its next question when it has the answer."""

    def __init__(self, router: Router, checkpoints: Checkpoints) -> None:
        self.phase = ""
        self.served: list[Served] = []
        self.failures: list[str] = []
        self._router = router
        self._checkpoints = checkpoints
        self._stop = threading.Event()
        self._clients = [threading.Thread(target=self._ask, args=(n,)) for n in range(3)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(WAIT_S * 4)

    def _ask(self, client: int) -> None:
        with httpx.Client(base_url=self._router.url, timeout=WAIT_S * 4) as http:
            number = client
            while not self._stop.is_set():
                number += 3
                phase, request_id = self.phase, f"ask-{number}"
                try:
                    answer = collect(stream(http, self._checkpoints.body(number), request_id))
                    if not answer.done:
                        self.failures.append(f"{request_id}: {answer}")
                    self.served.append(Served(request_id, number, phase, answer.text))
                except Exception as error:
                    self.failures.append(f"{request_id}: {type(error).__name__}: {error}")

    def during(self, phase: str) -> list[Served]:
        """Answers to what was sent in a phase."""
        return [one for one in list(self.served) if one.phase == phase]

    def enter(self, phase: str, num: int = 9) -> None:
        """Begin a phase, and wait until so much that was sent in it is answered."""
        self.phase = phase
        for count in range(1, num + 1):

            def has(count: int = count) -> bool:
                return bool(self.failures) or len(self.during(phase)) >= count

            wait_until(has, f"{count} answers in {phase}")
        assert not self.failures, self.failures[:3]


@pytest.fixture
def fleet(checkpoints: Checkpoints, tmp_path: Path) -> Iterator[Replicas]:
    options = {"records_max": 100_000, "worker_silent_ms": 60_000}
    replicas = Replicas(checkpoints.old, tmp_path, options, {"drain_timeout_ms": 120_000})
    with running(replicas):
        yield replicas


def set_weights(router: Router, **weights: float) -> None:
    answer = router.admin.put(PATH, json={"weights": weights})
    assert answer.status_code == 200, answer.text
    assert answer.json()["weights"] == weights


def revisions(router: Router) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in router.admin.get(PATH).json()["revisions"]}


def drain_away(fleet: Replicas, *names: str) -> None:
    """Ask workers to end, and wait until they have."""
    for name in names:
        fleet.workers[name].popen.send_signal(signal.SIGTERM)
    for name in names:
        assert fleet.workers.pop(name).popen.wait(START_S) == 0
        del fleet.epochs[name]


def test_traffic_moves_by_weight_from_one_checkpoint_to_the_other(
    checkpoints: Checkpoints, fleet: Replicas
) -> None:
    fleet.worker_options["revision"] = "old"
    fleet.router_options["revision_weights"] = ("old=1",)
    fleet.start("r", p0="prefill", d0="decode")
    router = fleet.routers["r"]
    fleet.roles |= {"p1": "prefill", "d1": "decode"}
    revision_of = {"p0": "old", "d0": "old", "p1": "new", "d1": "new"}
    with Load(router, checkpoints) as load:
        load.enter("old alone")
        for name in ("p1", "d1"):
            changed = {"revision": "new", "model_dir": str(checkpoints.new)}
            fleet.start_worker(name, **changed, **NEW_CONTRACT)
        fleet.wait_ready()
        load.enter("0 %")
        shown = revisions(router)
        assert shown["old"]["hash_block_tokens"] != shown["new"]["hash_block_tokens"]
        assert shown["old"]["model_fingerprint"] != shown["new"]["model_fingerprint"]
        assert (shown["new"]["num_workers_ready"], shown["new"]["num_requests"]) == (2, 0)
        set_weights(router, old=1, new=1)
        load.enter("50 %", 24)
        set_weights(router, new=1)
        load.enter("100 %")
        wait_until(lambda: not revisions(router)["old"]["num_running"], "what is old to end")
        drain_away(fleet, "p0", "d0")
        wait_until(lambda: list(revisions(router)) == ["new"], "the old revision to be forgotten")
        load.enter("new alone")
        assert router.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert not load.failures, load.failures[:3]

    num: dict[str, dict[str, int]] = {}
    handed_over = set()
    for one in load.served:
        record = router.record(one.request_id)
        revision = record["revision"]
        assert one.text == checkpoints.text(one.number, revision), record
        other = "new" if revision == "old" else "old"
        assert one.text != checkpoints.text(one.number, other), "the control"
        for generation in record["generations"]:
            workers = {generation[part]["worker_id"] for part in ("prefill", "decode")}
            assert {revision_of[name] for name in workers} == {revision}, record
            handed_over |= {revision} if len(workers) == 2 else set()
        of_phase = num.setdefault(one.phase, {"old": 0, "new": 0})
        of_phase[revision] += 1
    assert handed_over == {"old", "new"}
    for phase in ("old alone", "0 %"):
        assert num[phase]["new"] == 0, num
    for phase in ("100 %", "new alone"):
        assert num[phase]["old"] == 0, num
    assert min(num["50 %"].values()) >= 3, num


def test_a_fleet_of_another_contract_takes_the_place_of_one_that_has_gone(
    checkpoints: Checkpoints, fleet: Replicas
) -> None:
    """All under one name: while the old one is there, the new one is refused and told why."""
    fleet.start("r", s0="both")
    router = fleet.routers["r"]
    answer = collect(stream(router.http, checkpoints.body(0), "before"))
    assert answer.text == checkpoints.text(0, "old")
    fleet.roles["s1"] = "both"
    fleet.start_worker("s1", model_dir=str(checkpoints.new), **NEW_CONTRACT)
    wait_until(
        lambda: "Another model.revision" in router.process.logged(), "the new worker's refusal"
    )
    assert list(router.workers()) == ["s0"]
    drain_away(fleet, "s0")
    fleet.wait_ready()
    (view,) = revisions(router).values()
    assert (view["name"], view["hash_block_tokens"]) == ("default", 32)
    for number in range(NUM_PROMPTS):
        answer = collect(stream(router.http, checkpoints.body(number), f"after-{number}"))
        assert (answer.text, answer.done) == (checkpoints.text(number, "new"), True)
    again = router.http.post("/v1/completions", json=checkpoints.body(0)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 64, "by the new hashes"
    too_long = checkpoints.body(0) | {"max_tokens": 500}
    refused = router.http.post("/v1/completions", json=too_long)
    assert (refused.status_code, "512" in refused.text) == (400, True)
