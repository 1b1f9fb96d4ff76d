"""Every message survives the wire unchanged; every member of a union has a codec."""

import typing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages import outputs, peer, reports, session, stats, submit
from disagg.messages.identity import Attempt, Incarnation, RequestKey
from disagg.messages.kv_events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KVEvent,
    KVEventBatch,
    KVSnapshot,
    SnapshotPart,
    TierCleared,
    TierRemoved,
    TierStored,
)
from disagg.messages.registration import Contract, GroupInfo, TierInfo, WorkerInfo
from disagg.messages.router import CacheMatch, WorkerMatch
from disagg.messages.sampling import SamplingParams, TokenLogprobs
from disagg.messages.step_times import NUM_FEATURES, PAIRS, StepTimes
from disagg.wire.kv_events_codec import kv_batch_from_wire, kv_batch_to_wire
from disagg.wire.peer_codec import peer_from_wire, peer_to_wire
from disagg.wire.registration_codec import worker_info_from_wire, worker_info_to_wire
from disagg.wire.router_codec import (
    cache_match_from_wire,
    cache_match_to_wire,
    match_from_wire,
    match_to_wire,
)
from disagg.wire.session_codec import (
    session_request_from_wire,
    session_request_to_wire,
    session_response_from_wire,
    session_response_to_wire,
)
from disagg.wire.stream_hello import PeerHello, PoolInfo, SessionOpen
from disagg.wire.v1 import kv_events_pb2, peer_pb2, registration_pb2, router_pb2, session_pb2

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
positive = st.integers(1, 2**32 - 1)
token = st.integers(0, 2**31 - 1)
number = st.floats(allow_nan=False)  # NaN != NaN; -inf is a real logprob
finite = st.floats(allow_nan=False, allow_infinity=False)
above_0 = st.floats(0, exclude_min=True, allow_infinity=False)
share = st.floats(0, 1, exclude_min=True)
line_of = st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp"))
text = st.text(line_of, max_size=8)
name = st.text(line_of, min_size=1, max_size=8)
digest = st.binary(min_size=32, max_size=32)


def tuples(
    inner: st.SearchStrategy[typing.Any], min_size: int = 0
) -> st.SearchStrategy[typing.Any]:
    return st.lists(inner, min_size=min_size, max_size=4).map(tuple)


ROUTER_ID = "router-0:0a1b"
router_ids = st.sampled_from([ROUTER_ID, "another:1"])
keys = st.builds(RequestKey, name, u32, text)
incarnations = st.builds(Incarnation, name, name)
own_keys = st.builds(RequestKey, name, u32, st.just(ROUTER_ID))
"""Of the router whose session it is."""
attempts = st.builds(Attempt, name, u32)
tops = tuples(st.tuples(token, number))
contracts = st.builds(
    Contract, text, text, tuples(text), text, u64, u32, text, st.integers(0, 5), st.integers(5, 9),
    layout_version=u32, checksums=text,
)  # fmt: skip
seals = st.builds(peer.Seal, u32, tuples(u32), st.none() | st.integers(0, 2**31 - 1), number, tops)
ranges = st.builds(peer.OfferedRange, u32, u32, u32, positive) | st.lists(
    u64, min_size=1, max_size=4
).flatmap(
    lambda sums: st.builds(
        peer.OfferedRange, u32, u32, u32, st.just(len(sums)), st.just(tuple(sums))
    )
)

PEER: dict[type, st.SearchStrategy[typing.Any]] = {
    peer.Reserve: st.builds(peer.Reserve, keys, u32),
    peer.Reserved: st.builds(peer.Reserved, keys, u32, st.booleans(), text, tuples(u32)),
    peer.Release: st.builds(peer.Release, keys, u32),
    peer.Offers: st.builds(
        peer.Offers,
        keys,
        u64,
        u32,
        tuples(ranges),
        st.none() | seals,
        st.booleans(),
        st.none() | positive,
        u32,
    ),
    peer.ReadProgress: st.builds(peer.ReadProgress, keys, u64, u32),
    peer.AskOffers: st.builds(peer.AskOffers, keys, st.none() | u64, u32),
    peer.Commit: st.builds(peer.Commit, keys, u64, attempts, tuples(u32)),
    peer.CommitAnswer: st.builds(peer.CommitAnswer, keys, u64, attempts, st.booleans(), text),
    peer.CommitSeen: st.builds(peer.CommitSeen, keys, u64, attempts),
    peer.AskLease: st.builds(
        peer.AskLease, keys, positive, positive, u32, tuples(digest, min_size=1), tuples(u32)
    ),
    peer.TakeOver: st.builds(peer.TakeOver, keys, positive, keys, tuples(u32)),
    peer.LeaseRefused: st.builds(peer.LeaseRefused, keys, positive),
    peer.LeaseLoading: st.builds(peer.LeaseLoading, keys, positive, u32),
    peer.WithdrawLease: st.builds(peer.WithdrawLease, keys, positive, text),
    peer.Ended: st.builds(peer.Ended, keys, text),
    peer.WrongEpoch: st.builds(peer.WrongEpoch, name),
}
pools = st.builds(
    PoolInfo, st.binary(max_size=8), u64, st.integers(1, 2**64 - 1),
    st.integers(1, 2**64 - 1), st.sampled_from(["DRAM", "VRAM"]), u32,
)  # fmt: skip
hellos = st.lists(pools, min_size=1, max_size=3).flatmap(
    lambda ranks: st.builds(
        PeerHello,
        contracts.map(lambda contract: replace(contract, num_ranks=len(ranks))),
        name,
        st.just(tuple(ranks)),
    )
)
sampling = st.builds(
    SamplingParams, u32, above_0 | st.just(0.0), share, u32, st.integers(-(2**63), 2**63 - 1),
    tuples(token), st.none() | st.integers(0, 20), share, finite, finite, above_0,
    st.dictionaries(token, finite, max_size=4).map(lambda bias: tuple(sorted(bias.items()))), u32,
    st.text(max_size=8), tuples(token), u32, st.none() | st.integers(0, 20),
)  # fmt: skip
addresses = st.builds(submit.PeerAddress, incarnations, name)
pulls = st.builds(submit.PullPlan, addresses, u32)


@st.composite
def submits(draw: st.DrawFn) -> submit.Submit:
    role = draw(st.sampled_from(submit.Role))
    return submit.Submit(
        key=draw(own_keys),
        role=role,
        token_ids=draw(tuples(token, min_size=1)),
        hashes=draw(tuples(digest)),
        cache_salt=draw(st.binary(max_size=8)),
        sampling=draw(sampling),
        peer=None if role is submit.Role.LOCAL else draw(addresses),
        pull=None if role is submit.Role.DECODE else draw(st.none() | pulls),
        take_over=draw(st.none() | own_keys) if role is submit.Role.DECODE else None,
    )


ROUTER: dict[type, st.SearchStrategy[typing.Any]] = {
    submit.Submit: submits(),
    session.Cancel: st.builds(session.Cancel, own_keys, text),
    session.ResetPrefixCache: st.builds(session.ResetPrefixCache, u64, router_ids),
    session.WorkerIdClaimed: st.builds(session.WorkerIdClaimed, addresses),
    session.Drain: st.builds(session.Drain, u32, st.booleans()),
    session.CallOffDrain: st.just(session.CallOffDrain()),
    session.Claim: st.builds(
        session.Claim, own_keys, st.binary(min_size=16, max_size=16), u64, st.booleans(), u64
    ),
}


@st.composite
def sequence_outputs(draw: st.DrawFn) -> outputs.SequenceOutput:
    token_ids = draw(tuples(token))
    scored = draw(st.booleans())
    score = st.builds(TokenLogprobs, number, tops)
    logprobs = tuple(draw(score) for _ in token_ids) if scored else ()
    finish = draw(st.sampled_from(outputs.FinishReason))
    return outputs.SequenceOutput(draw(own_keys), draw(u32), token_ids, logprobs, finish)


prompt_logprobs = st.builds(
    outputs.PromptLogprobs, own_keys, u32, tuples(st.builds(TokenLogprobs, number, tops, u32))
)
transfers = st.builds(
    reports.GroupTransfer, u32, name, u32, u32, st.text("ph.n", max_size=5), u32, u64, u64, u32, u64
)
counters = st.dictionaries(name, u64, max_size=3).map(lambda d: tuple(sorted(d.items())))
num_bounds = len(stats.RESIDENCY_BOUNDS_MS)
histograms = st.builds(
    stats.ResidencyHistogram,
    name,
    st.lists(u64, min_size=num_bounds + 1, max_size=num_bounds + 1).map(tuple),
    u64,
)
sums = st.floats(0, 1e39)
step_times = st.builds(
    StepTimes,
    u64,
    st.tuples(*[sums] * len(PAIRS)),
    st.tuples(*[sums] * NUM_FEATURES),
    u32,
)
WORKER: dict[type, st.SearchStrategy[typing.Any]] = {
    outputs.StepOutputs: st.builds(
        outputs.StepOutputs, tuples(sequence_outputs(), min_size=1), tuples(prompt_logprobs)
    ),
    session.PartEnded: st.builds(
        session.PartEnded, own_keys, st.sampled_from(session.EndReason), text
    ),
    session.PrefillProgress: st.builds(session.PrefillProgress, own_keys, u32, st.booleans()),
    reports.PrefillReport: st.builds(reports.PrefillReport, own_keys, u32, u32, u32, u32, u32),
    reports.TransferReport: st.builds(
        reports.TransferReport,
        own_keys,
        incarnations,
        tuples(transfers),
        u32,
        u32,
        u32,
        st.sampled_from(reports.TransferKind),
        u32,
        u32,
        u32,
        text,
    ),
    stats.WorkerStats: st.builds(
        stats.WorkerStats,
        u32,
        u32,
        u32,
        u64,
        u64,
        u32,
        u32,
        u32,
        u64,
        st.booleans(),
        counters,
        tuples(histograms),
        st.booleans(),
        tuples(st.builds(stats.RouterLoad, router_ids, u32, u64)),
        st.none() | step_times,
    ),
    session.PrefixCacheReset: st.builds(
        session.PrefixCacheReset, u64, u64, counters, text, router_ids
    ),
    session.Superseded: st.builds(session.Superseded, own_keys),
}


@st.composite
def stored_events(draw: st.DrawFn) -> BlocksStored:
    hashes = draw(tuples(digest))
    block_tokens = draw(st.integers(1, 3))
    token_ids: tuple[int, ...] = ()
    if draw(st.booleans()):
        token_ids = tuple(draw(token) for _ in range(len(hashes) * block_tokens))
    parent = draw(st.none() | digest)
    return BlocksStored(draw(u32), hashes, parent, draw(u32), block_tokens, token_ids)


tier_stored = st.builds(TierStored, u32, u32, tuples(digest))
EVENTS: dict[type, st.SearchStrategy[typing.Any]] = {
    BlocksStored: stored_events(),
    BlocksRemoved: st.builds(BlocksRemoved, u32, tuples(digest)),
    AllCleared: st.builds(AllCleared),
    TierStored: tier_stored,
    TierRemoved: st.builds(TierRemoved, u32, u32, tuples(digest)),
    TierCleared: st.builds(TierCleared, u32),
}
groups = st.builds(GroupInfo, name, positive, u32, u32, u64)
infos = st.builds(
    WorkerInfo, incarnations, name, st.sampled_from(["prefill", "decode", "both"]), name, contracts,
    tuples(groups, min_size=1), u32, u32, u64, tuples(st.builds(TierInfo, name, u64)),
)  # fmt: skip


def without_codec(union: object, strategies: dict[type, typing.Any]) -> set[type]:
    return set(typing.get_args(union)) ^ set(strategies)


@pytest.mark.parametrize(
    ("union", "strategies"),
    [
        (peer.PeerMessage, PEER),
        (session.ToWorkerMessage, ROUTER),
        (session.ToRouterMessage, WORKER),
        (KVEvent, EVENTS),
    ],
)
def test_every_member_of_a_union_is_tested(
    union: object, strategies: dict[type, typing.Any]
) -> None:
    assert not without_codec(union, strategies)


def test_a_new_member_without_a_codec_is_noticed() -> None:
    class Novel: ...

    assert without_codec(peer.PeerMessage | Novel, PEER) == {Novel}
    with pytest.raises(AssertionError):
        peer_to_wire(Incarnation("w", "e"), "f", Novel())  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        session_request_to_wire(Novel())  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        session_response_to_wire(Novel())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*PEER, PeerHello])
def test_peer_messages(kind: type) -> None:
    @settings(max_examples=60, deadline=None)
    @given(incarnations, name, PEER.get(kind, hellos))
    def check(sender: Incarnation, epoch: str, message: typing.Any) -> None:
        sent = peer_to_wire(sender, epoch, message).SerializeToString()
        received = peer_from_wire(peer_pb2.PeerEnvelope.FromString(sent))
        assert received == (sender, epoch, message)

    check()


@pytest.mark.parametrize("kind", [*ROUTER, SessionOpen])
def test_session_requests(kind: type) -> None:
    @settings(max_examples=60, deadline=None)
    @given(ROUTER.get(kind, st.builds(SessionOpen, router_ids, incarnations, st.booleans())))
    def check(message: typing.Any) -> None:
        sent = session_request_to_wire(message).SerializeToString()
        received = session_pb2.SessionRequest.FromString(sent)
        assert session_request_from_wire(received, ROUTER_ID) == message

    check()


@pytest.mark.parametrize("kind", WORKER)
def test_session_responses(kind: type) -> None:
    @settings(max_examples=60, deadline=None)
    @given(WORKER[kind])
    def check(message: typing.Any) -> None:
        sent = session_response_to_wire(message).SerializeToString()
        received = session_pb2.SessionResponse.FromString(sent)
        assert session_response_from_wire(received, ROUTER_ID) == message

    check()


part = st.integers(1, 9).flatmap(
    lambda num: st.integers(0, num - 1).map(lambda number: SnapshotPart(number, num))
)


@settings(max_examples=60, deadline=None)
@given(
    name,
    st.builds(KVEventBatch, u64, tuples(st.one_of(*EVENTS.values())))
    | st.builds(KVSnapshot, u64, tuples(tuples(digest)), tuples(tier_stored), part),
)
def test_kv_events(epoch: str, batch: KVEventBatch | KVSnapshot) -> None:
    sent = kv_batch_to_wire(epoch, batch).SerializeToString()
    assert kv_batch_from_wire(kv_events_pb2.KvEventBatch.FromString(sent)) == (epoch, batch)


@settings(max_examples=60, deadline=None)
@given(infos)
def test_registration(info: WorkerInfo) -> None:
    sent = worker_info_to_wire(info).SerializeToString()
    received = worker_info_from_wire(registration_pb2.RegisterRequest.FromString(sent))
    assert received == info
    assert received != replace(info, num_blocks=info.num_blocks ^ 1)  # the comparison can fail


@settings(max_examples=60, deadline=None)
@given(st.builds(WorkerMatch, incarnations, name, u32, tuples(u32)))
def test_matches(match: WorkerMatch) -> None:
    sent = match_to_wire(match).SerializeToString()
    assert match_from_wire(router_pb2.WorkerMatch.FromString(sent)) == match


@given(st.builds(CacheMatch, name, u32, tuples(u32)))
def test_cache_matches(match: CacheMatch) -> None:
    sent = cache_match_to_wire(match).SerializeToString()
    assert cache_match_from_wire(router_pb2.CacheMatch.FromString(sent)) == match
