"""Whatever is malformed is refused with the name of the field."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import ProtocolError
from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.kv_events import BlocksStored, KVEventBatch, KVSnapshot
from disagg.messages.outputs import PromptLogprobs, SequenceOutput, StepOutputs
from disagg.messages.peer import (
    AskLease,
    Commit,
    LeaseLoading,
    LeaseRefused,
    OfferedRange,
    Offers,
    Reserve,
    Seal,
    TakeOver,
    WithdrawLease,
    WrongEpoch,
)
from disagg.messages.registration import Contract, GroupInfo, WorkerInfo
from disagg.messages.reports import GroupTransfer, TransferReport
from disagg.messages.sampling import SamplingParams, TokenLogprobs
from disagg.messages.session import EndReason, PartEnded, PrefillProgress, PrefixCacheReset
from disagg.messages.stats import WorkerStats
from disagg.messages.step_times import StepTimes
from disagg.messages.submit import PeerAddress, PullPlan, Role, Submit
from disagg.wire.kv_events_codec import kv_batch_from_wire, kv_batch_to_wire
from disagg.wire.peer_codec import peer_from_wire, peer_to_wire
from disagg.wire.registration_codec import worker_info_from_wire, worker_info_to_wire
from disagg.wire.reports_codec import POSITIONS_MAX
from disagg.wire.session_codec import (
    session_request_from_wire,
    session_request_to_wire,
    session_response_from_wire,
    session_response_to_wire,
)
from disagg.wire.stats_codec import COUNTERS_MAX
from disagg.wire.stream_hello import PeerHello, PoolInfo, SessionOpen
from disagg.wire.v1 import outputs_pb2, peer_pb2

KEY = RequestKey("r", 0)
ME = Incarnation("w", "e")
CONTRACT = Contract("f", "float32", ("g",), "pages", 4096, 16, "sha256", 1, 1)
SCORE = TokenLogprobs(-0.5, ((3, -0.5), (4, -1.0)))


def peer(message: Any) -> Message:
    return peer_to_wire(ME, "f", message)


def hello() -> Message:
    return peer(PeerHello(CONTRACT, "h:1", (PoolInfo(b"m", 4096, 8, 4096, "DRAM", 0),)))


def offers() -> Message:
    seal = Seal(5, (1,), 7, -0.5, ((7, -0.5),))
    return peer(Offers(KEY, 1, 0, (OfferedRange(0, 0, 3, 1),), seal))


def commit() -> Message:
    return peer(Commit(KEY, 1, Attempt("e", 1), (1,)))


def opening() -> Message:
    return peer(AskLease(KEY, 1, 32, 0, (b"x" * 32, b"y" * 32), (0, 1)))


def taking_over() -> Message:
    return peer(TakeOver(KEY, 1, RequestKey("r", 1), (0,)))


def submit() -> Message:
    address = PeerAddress(Incarnation("p", "q"), "h:2")
    sampling = SamplingParams(max_tokens=1)
    pull = PullPlan(address, 64)
    return session_request_to_wire(
        Submit(KEY, Role.PREFILL, (1, 2), (b"x" * 32,), b"", sampling, address, pull)
    )


def outputs() -> Message:
    rows = (
        SequenceOutput(KEY, 5, (1, 2), (SCORE, SCORE)),
        SequenceOutput(RequestKey("s", 1), 9, (3,)),
    )
    prompt = PromptLogprobs(KEY, 1, (SCORE, SCORE))
    return session_response_to_wire(StepOutputs(rows, (prompt,)))


def stored() -> Message:
    event = BlocksStored(0, (b"x" * 32,), b"y" * 32, 0, 2, (1, 2))
    return kv_batch_to_wire("e", KVEventBatch(0, (event,)))


def snapshot() -> Message:
    return kv_batch_to_wire("e", KVSnapshot(4, ((b"x" * 32,),)))


def registration() -> Message:
    group = GroupInfo("full_attention", 16, 0, 2, 4096)
    return worker_info_to_wire(WorkerInfo(ME, "h:1", "both", "m", CONTRACT, (group,), 100, 50, 8))


def load() -> Message:
    stats = WorkerStats(0, 0, 0, 0, 0, 0, 0, 0, 0, True, (("n", 1),), step_times=StepTimes(1))
    return session_response_to_wire(stats)


def transfer() -> Message:
    group = GroupTransfer(0, "full_attention", 0, 16, "p", 1, 1, 1, 1, 1)
    return session_response_to_wire(TransferReport(KEY, ME, (group,), 0, 0, 0))


CASES: list[tuple[str, Callable[[], Message], Callable[[Any], object]]] = [
    ("PeerEnvelope.sender", hello, lambda w: w.ClearField("sender")),
    ("Incarnation.epoch", hello, lambda w: w.sender.ClearField("epoch")),
    ("PeerEnvelope.message", hello, lambda w: w.ClearField("hello")),
    ("PeerEnvelope.addressee_epoch", commit, lambda w: w.ClearField("addressee_epoch")),
    ("PeerHello.contract", hello, lambda w: w.hello.ClearField("contract")),
    ("Contract.wire_min", hello, lambda w: setattr(w.hello.contract, "wire_min", 2)),
    ("Contract.num_ranks", hello, lambda w: w.hello.contract.ClearField("num_ranks")),
    ("PeerHello.pools", hello, lambda w: w.hello.ClearField("pools")),
    ("PeerHello.pools", hello, lambda w: w.hello.pools.add()),
    ("PoolInfo.memory_kind", hello, lambda w: setattr(w.hello.pools[0], "memory_kind", "FILE")),
    ("PoolInfo.num_blocks", hello, lambda w: w.hello.pools[0].ClearField("num_blocks")),
    ("PeerHello.address", hello, lambda w: w.hello.ClearField("address")),
    (
        "PromptLogprobs.key",
        outputs,
        lambda w: w.outputs.prompt_logprobs[0].ClearField("key"),
    ),
    ("Offers.key", offers, lambda w: w.offers.ClearField("key")),
    ("OfferedRange.checksums", offers, lambda w: w.offers.ranges[0].checksums.extend([1, 2])),
    ("OfferedRange.num_blocks", offers, lambda w: w.offers.ranges[0].ClearField("num_blocks")),
    ("TopLogprobs.logprobs", offers, lambda w: w.offers.seal.first_top.logprobs.append(0)),
    ("RequestKey.request_id", commit, lambda w: w.commit.key.ClearField("request_id")),
    ("Commit.attempt", commit, lambda w: w.commit.ClearField("attempt")),
    ("Attempt.reader_epoch", commit, lambda w: w.commit.attempt.ClearField("reader_epoch")),
    ("AskLease.key", opening, lambda w: w.ask_lease.ClearField("key")),
    ("AskLease.number", opening, lambda w: w.ask_lease.ClearField("number")),
    ("AskLease.num_tokens", opening, lambda w: w.ask_lease.ClearField("num_tokens")),
    ("AskLease.hashes", opening, lambda w: w.ask_lease.ClearField("hashes")),
    ("AskLease.hashes", opening, lambda w: setattr(w.ask_lease, "hashes", b"x" * 33)),
    ("TakeOver.number", taking_over, lambda w: w.take_over.ClearField("number")),
    ("TakeOver.old", taking_over, lambda w: w.take_over.ClearField("old")),
    (
        "LeaseRefused.request_number",
        lambda: peer(LeaseRefused(KEY, 1)),
        lambda w: w.lease_refused.ClearField("request_number"),
    ),
    (
        "LeaseLoading.request_number",
        lambda: peer(LeaseLoading(KEY, 1, 0)),
        lambda w: w.lease_loading.ClearField("request_number"),
    ),
    (
        "Offers.request_number",
        lambda: peer(Offers(KEY, 1, 0, request_number=1)),
        lambda w: setattr(w.offers, "request_number", 0),
    ),
    (
        "WithdrawLease.number",
        lambda: peer(WithdrawLease(KEY, 1)),
        lambda w: w.withdraw_lease.ClearField("number"),
    ),
    (
        "WrongEpoch.expected_epoch",
        lambda: peer(WrongEpoch("x")),
        lambda w: w.wrong_epoch.ClearField("expected_epoch"),
    ),
    ("SessionRequest.message", submit, lambda w: w.ClearField("submit")),
    ("Submit.role", submit, lambda w: setattr(w.submit, "role", "cook")),
    ("Submit.peer", submit, lambda w: w.submit.ClearField("peer")),
    ("Submit.peer", submit, lambda w: setattr(w.submit, "role", "local")),
    ("Submit.sampling", submit, lambda w: w.submit.ClearField("sampling")),
    ("Submit.token_ids", submit, lambda w: w.submit.ClearField("token_ids")),
    ("Submit.hashes", submit, lambda w: setattr(w.submit, "hashes", b"x" * 31)),
    ("Submit.pull", submit, lambda w: setattr(w.submit, "role", "decode")),
    ("Submit.take_over", submit, lambda w: w.submit.take_over.CopyFrom(w.submit.key)),
    ("PullPlan.owner", submit, lambda w: w.submit.pull.ClearField("owner")),
    (
        "PrefillProgress.key",
        lambda: session_response_to_wire(PrefillProgress(KEY, 64)),
        lambda w: w.progress.ClearField("key"),
    ),
    (
        "TransferReport.kind",
        lambda: session_response_to_wire(TransferReport(KEY, ME, (), 0, 0, 0)),
        lambda w: setattr(w.transfer, "kind", "gift"),
    ),
    ("PeerAddress.address", submit, lambda w: w.submit.peer.ClearField("address")),
    (
        "SessionOpen.router_id",
        lambda: session_request_to_wire(SessionOpen("r", ME)),
        lambda w: w.open.ClearField("router_id"),
    ),
    ("SessionResponse.message", outputs, lambda w: w.ClearField("outputs")),
    (
        "PartEnded.reason",
        lambda: session_response_to_wire(PartEnded(KEY, EndReason.EXPIRED)),
        lambda w: setattr(w.part_ended, "reason", "bored"),
    ),
    ("StepOutputs.finish_reasons", outputs, lambda w: w.outputs.finish_reasons.__setitem__(0, 3)),
    ("StepOutputs.request_ids", outputs, lambda w: w.outputs.request_ids.__setitem__(0, "")),
    ("StepOutputs.token_ids", outputs, lambda w: w.outputs.num_tokens.__setitem__(0, 3)),
    ("StepOutputs.logprobs", outputs, lambda w: w.outputs.has_logprobs.__setitem__(1, True)),
    ("StepOutputs.top_token_ids", outputs, lambda w: w.outputs.num_top.__setitem__(0, 9)),
    ("StepTimes.products", load, lambda w: w.stats.step_times.products.__setitem__(0, 1e308)),
    ("StepTimes.timed", load, lambda w: w.stats.step_times.timed.__setitem__(0, math.nan)),
    ("StepTimes.timed", load, lambda w: w.stats.step_times.timed.__setitem__(0, -1.0)),
    (
        "WorkerStats.counters",
        load,
        lambda w: w.stats.counters.update({str(number): 1 for number in range(COUNTERS_MAX + 1)}),
    ),
    ("WorkerStats.counters", load, lambda w: w.stats.counters.update({301 * "n": 1})),
    ("GroupTransfer.kind", transfer, lambda w: setattr(w.transfer.groups[0], "kind", "a\nb")),
    (
        "GroupTransfer.block_map",
        transfer,
        lambda w: setattr(w.transfer.groups[0], "block_map", "p" * (POSITIONS_MAX + 1)),
    ),
    (
        "PrefixCacheReset.router",
        lambda: session_response_to_wire(PrefixCacheReset(1, 0)),
        lambda w: setattr(w.reset, "router", 301 * "r"),
    ),
    ("KvEventBatch.epoch", stored, lambda w: w.ClearField("epoch")),
    ("KvEvent.event", stored, lambda w: w.events[0].ClearField("stored")),
    ("BlocksStored.hashes", stored, lambda w: setattr(w.events[0].stored, "hashes", b"x")),
    (
        "BlocksStored.parent_hash",
        stored,
        lambda w: setattr(w.events[0].stored, "parent_hash", b"x"),
    ),
    ("BlocksStored.block_tokens", stored, lambda w: w.events[0].stored.ClearField("block_tokens")),
    ("BlocksStored.token_ids", stored, lambda w: w.events[0].stored.token_ids.append(1)),
    ("KvEventBatch.events", snapshot, lambda w: w.events.add()),
    ("KvSnapshot.hashes", snapshot, lambda w: w.snapshot.hashes.append(b"x")),
    ("KvSnapshot.part", snapshot, lambda w: setattr(w.snapshot, "part", 1)),
    ("RegisterRequest.worker", registration, lambda w: w.ClearField("worker")),
    ("Incarnation.worker_id", registration, lambda w: setattr(w.worker, "worker_id", 301 * "w")),
    ("Incarnation.worker_id", registration, lambda w: setattr(w.worker, "worker_id", "w\nx")),
    ("Incarnation.epoch", registration, lambda w: setattr(w.worker, "epoch", "e\x1b[2J")),
    ("RegisterRequest.address", registration, lambda w: setattr(w, "address", 301 * "h")),
    ("RegisterRequest.role", registration, lambda w: setattr(w, "role", "cook")),
    ("RegisterRequest.groups", registration, lambda w: w.ClearField("groups")),
    ("RegisterRequest.model", registration, lambda w: w.ClearField("model")),
    ("GroupInfo.block_tokens", registration, lambda w: w.groups[0].ClearField("block_tokens")),
    ("GroupInfo.kind", registration, lambda w: w.groups[0].ClearField("kind")),
]
DECODERS: dict[str, Callable[[Any], object]] = {
    "PeerEnvelope": peer_from_wire,
    "SessionRequest": session_request_from_wire,
    "SessionResponse": session_response_from_wire,
    "KvEventBatch": kv_batch_from_wire,
    "RegisterRequest": worker_info_from_wire,
}
COLUMNS = [
    (message.name, field.name)
    for message, skipped in (
        (outputs_pb2.StepOutputs.DESCRIPTOR, {"prompt_logprobs"}),
        (outputs_pb2.PromptLogprobs.DESCRIPTOR, {"key", "position"}),
    )
    for field in message.fields
    if field.name not in skipped
]


def decode(wire: Message) -> object:
    return DECODERS[wire.DESCRIPTOR.name](wire)


@pytest.mark.parametrize(("field", "build", "damage"), CASES, ids=[case[0] for case in CASES])
def test_damage_is_refused_by_name(
    field: str, build: Callable[[], Message], damage: Callable[[Any], object]
) -> None:
    wire = build()
    decode(wire)  # sound until damaged
    damage(wire)
    with pytest.raises(ProtocolError, match=field) as caught:
        decode(wire)
    assert caught.value.param == field


@pytest.mark.parametrize(("message", "column"), COLUMNS)
@pytest.mark.parametrize("change", ["longer", "shorter"])
def test_columns_of_unequal_length_are_refused(message: str, column: str, change: str) -> None:
    wire: Any = outputs()
    of_prompt = message == "PromptLogprobs"
    values = getattr(wire.outputs.prompt_logprobs[0] if of_prompt else wire.outputs, column)
    if change == "longer":
        values.append(values[0])
    else:
        del values[-1]
    with pytest.raises(ProtocolError, match=message):
        decode(wire)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_bytes_raise_anything_but_protocol_error(data: st.DataObject) -> None:
    build = data.draw(
        st.sampled_from(
            [hello, offers, commit, opening, taking_over, submit, outputs, stored, snapshot]
        )
    )
    raw = bytearray(build().SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    wire = type(build())()
    try:
        wire.ParseFromString(bytes(raw))
    except DecodeError:  # grpc itself refuses these
        return
    with contextlib.suppress(ProtocolError):
        decode(wire)


def test_only_a_hello_may_lack_the_addressee() -> None:
    message = PeerHello(CONTRACT, "h:1", (PoolInfo(b"m", 4096, 8, 4096, "VRAM", 1),))
    assert peer_from_wire(peer_to_wire(ME, "", message)) == (ME, "", message)
    with pytest.raises(ProtocolError):
        peer_from_wire(peer_to_wire(ME, "", Reserve(KEY, 1)))


def test_our_own_mistakes_do_not_reach_the_wire() -> None:
    with pytest.raises(ValueError, match="parallel"):
        session_response_to_wire(StepOutputs((SequenceOutput(KEY, 0, (1, 2), (SCORE,)),)))
    with pytest.raises(ValueError, match="32 bytes"):
        kv_batch_to_wire("e", KVSnapshot(0, ((b"short",),)))


def test_an_unknown_kind_of_message_is_refused() -> None:
    later = b"\xa2\x06\x00"  # field 100, empty: what a newer peer might send
    wire = peer_pb2.PeerEnvelope.FromString(hello().SerializeToString() + later)
    wire.ClearField("hello")
    with pytest.raises(ProtocolError, match=r"PeerEnvelope\.message"):
        peer_from_wire(wire)


def test_what_a_worker_says_of_an_end_is_short_and_one_line() -> None:
    said = PartEnded(KEY, EndReason.STEP_FAILED, "out of\nmemory" + 2000 * "!")
    heard = session_response_from_wire(session_response_to_wire(said))
    assert isinstance(heard, PartEnded)
    assert heard.message.startswith("out of memory!")
    assert len(heard.message) == 1000
