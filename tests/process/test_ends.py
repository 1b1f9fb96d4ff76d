"""Workers that end while they serve: what their clients hear, and what is in the logs."""

import re
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.process.harness import MODEL, Process, wait_until
from tests.process.served_model import ServedModel

pytestmark = pytest.mark.timeout(600)

NOISE = re.compile(r"destroyed|never retrieved|Traceback|Exception|ERROR|shutdown")
"""None of it is the business of who reads a log after a stop."""
NUM_STREAMS = 3
NUM_TOKENS = 2_000
"""More than are sampled before the stop."""


def noise(process: Process) -> list[str]:
    return [line for line in process.logged().splitlines() if NOISE.search(line)]


def stream(served: ServedModel, prompt: tuple[int, ...], begun: list[int]) -> str:
    """Ask for more than will come; the error at its end."""
    answer = served.cluster.client.completions.create(
        model=MODEL,
        prompt=list(prompt),
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(answer)
    begun.append(len(prompt))
    with pytest.raises(openai.APIError) as ended:
        list(answer)
    return ended.value.message


def test_workers_that_are_stopped_while_they_serve_say_nothing_of_it(gemma3: ServedModel) -> None:
    """As the last ones: each stream ends in an error that says so."""
    cluster, begun = gemma3.cluster, list[int]()
    processes = dict(cluster.workers)
    # The reference takes its time: none may have come to its end when the last one begins.
    prompts = [gemma3.prompt(100 + n).prompt for n in range(NUM_STREAMS)]
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        asked = [threads.submit(stream, gemma3, prompt, begun) for prompt in prompts]
        wait_until(lambda: len(begun) == NUM_STREAMS, "all to stream")
        for process in processes.values():
            process.ask_to_stop()
        assert [process.popen.wait(60) for process in processes.values()] == [0, 0]
        for future in asked:
            assert re.search("no worker is ready|workers? (was|were) lost", future.result(60))
    for name, process in processes.items():
        assert noise(process) == [], name
        assert "lost" in process.logged(), name  # control: there is a log


def test_whom_a_killed_worker_leaves_behind_says_once_that_it_is_gone(gemma3: ServedModel) -> None:
    cluster = gemma3.cluster
    gemma3.serve(gemma3.prompt(150))
    left = {"router": cluster.router, "p0": cluster.workers["p0"]}
    before = {name: len(process.logged()) for name, process in left.items()}
    cluster.workers["d0"].kill()
    wait_until(lambda: "d0" not in cluster.known(), "the router to drop it")
    cluster.spawn("d0", "decode")
    cluster.wait_ready("d0")
    gemma3.serve(gemma3.prompt(150, salt="again"))
    for name, process in left.items():
        said = process.logged()[before[name] :]
        assert NOISE.search(said) is None, said
        assert "lost" in said or "ended" in said, name
