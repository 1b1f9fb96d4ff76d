"""Token ids and salts are in no log, error or repr, also where a worker fails."""

import asyncio
import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, cast

import grpc
import pytest
from opentelemetry.trace import NoOpTracer

import disagg
import disagg.router
import disagg.workers
from disagg.messages.identity import RequestKey
from disagg.messages.sampling import SamplingParams
from disagg.messages.submit import Role, Submit
from disagg.scheduling.step import SequenceSlice, Step, StepResult
from disagg.wire.session_codec import session_request_to_wire
from disagg.wire.v1 import worker_pb2_grpc
from disagg.workers.control import Control
from disagg.workers.engines.vllm.start import why_not
from disagg.workers.request_trace import RequestTrace
from disagg.workers.service import WorkerService
from tests.unit.workers.test_sessions import ME, TIMEOUT_S, NoPeers, new_core

TOKENS = (91_827_364, 56_473_829)
SALT = "salt-of-one-tenant"
SUBMIT = Submit(
    RequestKey("r", 1), Role.LOCAL, TOKENS, (), SALT.encode(), SamplingParams(max_tokens=4)
)
TOKEN_FIELDS = {"token_ids", "token_id", "stop_token_ids", "input_ids", "first_token_id"}
TOP_FIELDS = {"top", "first_top_logprobs"}
CLIENTS = TOKEN_FIELDS | TOP_FIELDS | {"cache_salt", "hash_key", "prompt", "stop", "text"}
"""Fields that hold what belongs to a client, or what keeps clients apart."""


def leaks(text: str) -> list[str]:
    return [secret for secret in (*map(str, TOKENS), SALT) if secret in text]


class FailingEngine:
    """Its error names the step that failed."""

    def prepare(self, step: Step) -> None:
        pass

    def run(self, step: Step) -> StepResult:
        raise RuntimeError(f"no such step can be computed: {step}")


class ForgetfulEngine:
    """Completes a step that was never launched."""

    def prepare(self, step: Step) -> None:
        pass

    def run(self, step: Step) -> StepResult:
        return StepResult(step.step_id + 1)


async def said_of_a_failing_run(engine: FailingEngine | ForgetfulEngine) -> list[str]:
    """What the router hears, and why the worker failed, if it did."""
    said: list[str] = []
    links = cast(Any, NoPeers())
    control = Control(new_core(), engine, links, said.append, RequestTrace(NoOpTracer()))
    control.start(links)
    control.open_session(lambda message: said.append(f"{message}"), lambda reason: None)
    control.router_message(SUBMIT)
    num_before = len(said)  # the receipt is one of them
    async with asyncio.timeout(TIMEOUT_S):
        while len(said) == num_before:
            await control.changed.wait()
    await control.stop()
    return said


def failing_run(caplog: pytest.LogCaptureFixture, engine: FailingEngine | ForgetfulEngine) -> str:
    """All that was logged and said."""
    caplog.set_level(logging.DEBUG)
    said = asyncio.run(said_of_a_failing_run(engine))
    return "\n".join([caplog.text, *said, repr(SUBMIT)])


def test_a_step_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    text = failing_run(caplog, FailingEngine())
    assert "no such step can be computed" in text
    assert leaks(text) == []


def test_an_invariant_that_does_not_hold(caplog: pytest.LogCaptureFixture) -> None:
    text = failing_run(caplog, ForgetfulEngine())
    assert "InvariantViolation: step 1 completed, in flight: [<step 0" in text
    assert leaks(text) == []


def test_control_with_pythons_own_reprs_it_leaks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repr_of_all(self: object) -> str:
        return str([getattr(self, field.name) for field in fields(cast(Any, self))])

    monkeypatch.setattr(SequenceSlice, "__repr__", repr_of_all)
    monkeypatch.setattr(Submit, "__repr__", repr_of_all)
    assert leaks(failing_run(caplog, FailingEngine())) == [*map(str, TOKENS), SALT]


async def details_of_a_session_that_begins_with_a_submit() -> str:
    links = cast(Any, NoPeers())
    control = Control(new_core(), cast(Any, None), links, pytest.fail, RequestTrace(NoOpTracer()))
    server = grpc.aio.server()
    service = WorkerService(ME, lambda: "both", control, links)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = cast(Any, worker_pb2_grpc.WorkerStub(channel)).Session(None)
        await call.write(session_request_to_wire(SUBMIT))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    await server.stop(0)
    return f"{refused.value.details()}"


def test_the_error_of_a_session_that_begins_with_a_submit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    details = asyncio.run(details_of_a_session_that_begins_with_a_submit())
    assert "not opened by a SessionOpen" in details
    assert leaks(details + caplog.text) == []


def kept_by_a_dataclass(shown: Callable[[Any], bool]) -> list[str]:
    """Fields of what belongs to a client, in any dataclass of the project."""
    found: set[str] = set()
    for package in (disagg, disagg.workers, disagg.router):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if "checking" in module.name or module.name.endswith("__main__"):
                continue
            if "engines.vllm." in module.name and why_not():  # vLLM is not here
                continue
            for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if cls.__module__.startswith("disagg") and is_dataclass(cls):
                    found |= {
                        f"{cls.__name__}.{field.name}"
                        for field in fields(cls)
                        if field.name in CLIENTS and shown(field)
                    }
    return sorted(found)


def test_no_dataclass_shows_what_belongs_to_a_client() -> None:
    assert {"Submit.token_ids", "Submit.cache_salt", "GenerationRequest.prompt"} <= set(
        kept_by_a_dataclass(lambda field: True)
    )
    assert kept_by_a_dataclass(lambda field: field.repr) == []
