"""Workers change roles under load: nothing fails, nothing is planned anew, nobody starts again.

The client never tries again. The control ends a worker instead: its requests are planned anew.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.process.harness import MODEL, WAIT_S, Cluster, running, wait_until
from tests.process.served_model import WINDOW

pytestmark = pytest.mark.timeout(900)

NUM_CLIENTS = 3
NUM_TOKENS = 24


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Cluster]:
    model_dir = make_checkpoint(tmp_path / "gemma3", "gemma3", window=WINDOW)
    options = {"worker_silent_ms": 60_000}
    cluster = Cluster(model_dir, tmp_path, router_options=options)
    with running(cluster, p0="prefill", d0="decode", d1="decode"):
        yield cluster


def body(salt: int) -> dict[str, Any]:
    prompt = [7 + (salt * 13 + i * i) % 90 for i in range(40 + salt)]
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
    }


class Load:
    """Clients that ask one request after the other, and never one again.

    Attributes:
        failures: answers that are no answers, or wrong.
        served: ids of the requests that were answered rightly.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.failures: list[str] = []
        self.served: list[str] = []
        self._cluster = cluster
        self._expected = {salt: self._text(salt, f"alone-{salt}") for salt in range(6)}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(4 * WAIT_S)

    def wait_for_more(self, number: int) -> None:
        """Until so many more were answered, whatever happens meanwhile."""
        before = len(self.served)
        wait_until(lambda: self.failures or len(self.served) >= before + number, "answers")

    def _ask(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            request_id, salt = f"load-{number}-{turn}", (number + turn) % len(self._expected)
            turn += 1
            try:
                text = self._text(salt, request_id)
                if text != self._expected[salt]:
                    raise AssertionError(f"{text!r}, expected {self._expected[salt]!r}")
                self.served.append(request_id)
            except Exception as error:
                self.failures.append(f"{request_id}: {error!r}")

    def _text(self, salt: int, request_id: str) -> str:
        answer = self._cluster.http.post(
            "/v1/completions", json=body(salt), headers={"X-Request-Id": request_id}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


def records(cluster: Cluster, load: Load) -> list[dict[str, Any]]:
    return [cluster.record(request_id) for request_id in load.served]


def test_roles_change_under_load_and_no_request_notices(served: Cluster) -> None:
    epochs = dict(served.epochs)
    with Load(served) as load:
        for changed in ({"d1": "prefill"}, {"p0": "decode", "d0": "prefill"}, {"d1": "both"},
                        {"p0": "prefill", "d0": "decode", "d1": "decode"}):  # fmt: skip
            load.wait_for_more(2)
            for name, role in changed.items():
                served.tell(name, f"role {role}")

            def known(changed: dict[str, str] = changed) -> bool:
                return all(
                    served.known()[name]["info"]["role"] == role for name, role in changed.items()
                )

            wait_until(known, f"the router to know of {changed}")
            load.wait_for_more(2 * NUM_CLIENTS)
    assert not load.failures, load.failures[:3]
    assert {name: served.status(name).worker.epoch for name in epochs} == epochs
    found = records(served, load)
    assert all(len(record["generations"]) == 1 for record in found), "none was planned anew"
    pairs = {
        (one["prefill"]["worker_id"], one["decode"]["worker_id"])
        for record in found
        for one in record["generations"]
    }
    assert {prefill for prefill, _ in pairs} >= {"p0", "d0"}, pairs
    assert {decode for _, decode in pairs} >= {"p0"}, pairs
    served.wait_quiescent()


def test_a_worker_that_is_killed_is_noticed(served: Cluster) -> None:
    """The control: an end in the midst of requests does not go unseen."""
    with Load(served) as load:
        load.wait_for_more(2)
        worker = served.workers["d0"]
        worker.stop()  # so that what it has is not over in time
        wait_until(lambda: served.known()["d0"]["num_live"], "a request there")
        worker.kill()
        load.wait_for_more(NUM_CLIENTS)
    anew = [record for record in records(served, load) if len(record["generations"]) > 1]
    assert anew or load.failures
