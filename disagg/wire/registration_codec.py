"""A worker's registration on the wire."""

from google.protobuf.message import Message

from disagg.messages.forms import GroupForm, Section
from disagg.messages.registration import (
    DEFAULT_REVISION,
    REVISION_NAME,
    Contract,
    GroupInfo,
    TierInfo,
    WorkerInfo,
)
from disagg.wire.checks import (
    NAME_CHARS_MAX,
    malformed,
    require_line,
    require_set,
    require_text,
)
from disagg.wire.identity_codec import incarnation_from_wire, incarnation_to_wire
from disagg.wire.v1 import registration_pb2

"""Of ids, epochs and addresses: host names have up to 253, and ids may be made of them."""


def contract_to_wire(contract: Contract) -> registration_pb2.Contract:
    """Encode a compatibility contract."""
    return registration_pb2.Contract(
        model_fingerprint=contract.model_fingerprint,
        dtype=contract.dtype,
        groups=contract.groups,
        page_format=contract.page_format,
        block_bytes=contract.block_bytes,
        hash_block_tokens=contract.hash_block_tokens,
        hash_scheme=contract.hash_scheme,
        wire_min=contract.wire_min,
        wire_max=contract.wire_max,
        num_ranks=contract.num_ranks,
        forms=map(form_to_wire, contract.forms),
        layout_version=contract.layout_version,
        checksums=contract.checksums,
    )


def contract_from_wire(parent: Message, field: str = "contract") -> Contract:
    """Decode the contract in a field of ``parent``."""
    require_set(parent, field)
    wire: registration_pb2.Contract = getattr(parent, field)
    if wire.wire_min > wire.wire_max:
        raise malformed(wire, "wire_min", f"is {wire.wire_min}, above wire_max {wire.wire_max}")
    if not wire.num_ranks:
        raise malformed(wire, "num_ranks", "is 0")
    return Contract(
        model_fingerprint=wire.model_fingerprint,
        dtype=wire.dtype,
        groups=tuple(wire.groups),
        page_format=wire.page_format,
        block_bytes=wire.block_bytes,
        hash_block_tokens=wire.hash_block_tokens,
        hash_scheme=wire.hash_scheme,
        wire_min=wire.wire_min,
        wire_max=wire.wire_max,
        num_ranks=wire.num_ranks,
        forms=tuple(map(form_from_wire, wire.forms)),
        layout_version=wire.layout_version,
        checksums=wire.checksums,
    )


def form_to_wire(form: GroupForm) -> registration_pb2.GroupForm:
    """Encode how a group's KV lies."""
    return registration_pb2.GroupForm(
        kind=form.kind,
        block_tokens=form.block_tokens,
        window_tokens=form.window_tokens,
        is_state=form.is_state,
        layers=form.layers,
        page_bytes=form.page_bytes,
        blocks_per_state=form.blocks_per_state,
        useful_bytes=form.useful_bytes,
        sections=[
            registration_pb2.Section(
                name=section.name,
                offset=section.offset,
                num_heads=section.num_heads,
                heads_per_rank=section.heads_per_rank,
                head_stride=section.head_stride,
                token_stride=section.token_stride,
                unit_bytes=section.unit_bytes,
            )
            for section in form.sections
        ],
    )


def form_from_wire(wire: registration_pb2.GroupForm) -> GroupForm:
    """Decode how a group's KV lies; what contradicts itself is refused when it is compared."""
    return GroupForm(
        wire.kind,
        wire.block_tokens,
        wire.window_tokens,
        wire.is_state,
        tuple(wire.layers),
        wire.page_bytes,
        wire.blocks_per_state,
        wire.useful_bytes,
        tuple(
            Section(
                one.name,
                one.offset,
                one.num_heads,
                one.heads_per_rank,
                one.head_stride,
                one.token_stride,
                one.unit_bytes,
            )
            for one in wire.sections
        ),
    )


def group_to_wire(group: GroupInfo) -> registration_pb2.GroupInfo:
    """Encode what routing needs to know of a group."""
    return registration_pb2.GroupInfo(
        kind=group.kind,
        block_tokens=group.block_tokens,
        window_tokens=group.window_tokens,
        num_layers=group.num_layers,
        useful_bytes=group.useful_bytes,
    )


def group_from_wire(wire: registration_pb2.GroupInfo) -> GroupInfo:
    """Decode what routing needs to know of a group."""
    require_text(wire, "kind")
    if not wire.block_tokens:
        raise malformed(wire, "block_tokens", "is 0")
    return GroupInfo(
        wire.kind, wire.block_tokens, wire.window_tokens, wire.num_layers, wire.useful_bytes
    )


def worker_info_to_wire(info: WorkerInfo) -> registration_pb2.RegisterRequest:
    """Encode a registration."""
    return registration_pb2.RegisterRequest(
        worker=incarnation_to_wire(info.incarnation),
        address=info.address,
        role=info.role,
        model=info.model,
        contract=contract_to_wire(info.contract),
        groups=[group_to_wire(group) for group in info.groups],
        max_model_tokens=info.max_model_tokens,
        handover_tokens_max=info.handover_tokens_max,
        num_blocks=info.num_blocks,
        tiers=[
            registration_pb2.TierInfo(name=tier.name, num_blocks=tier.num_blocks)
            for tier in info.tiers
        ],
        max_sequences=info.max_sequences,
        revision=info.revision,
        tokenizer_digest=info.tokenizer_digest,
        takes_drain=info.takes_drain,
        takes_batches=info.takes_batches,
    )


def worker_info_from_wire(wire: registration_pb2.RegisterRequest) -> WorkerInfo:
    """Decode a registration."""
    require_text(wire, "address", "model")
    require_line(wire, "address", NAME_CHARS_MAX)
    for field in ("worker_id", "epoch"):
        require_line(wire.worker, field, NAME_CHARS_MAX)
    if wire.role not in ("prefill", "decode", "both"):
        raise malformed(wire, "role", f"is {wire.role!r}, not one of prefill, decode, both")
    if not wire.groups:
        raise malformed(wire, "groups", "is empty")
    revision = wire.revision or DEFAULT_REVISION
    if not REVISION_NAME.fullmatch(revision):
        raise malformed(wire, "revision", "is no name of 1 to 63 letters, digits or . _ -")
    return WorkerInfo(
        incarnation=incarnation_from_wire(wire, "worker"),
        address=wire.address,
        role=wire.role,
        model=wire.model,
        contract=contract_from_wire(wire),
        groups=tuple(group_from_wire(group) for group in wire.groups),
        max_model_tokens=wire.max_model_tokens,
        handover_tokens_max=wire.handover_tokens_max,
        num_blocks=wire.num_blocks,
        tiers=tuple(TierInfo(tier.name, tier.num_blocks) for tier in wire.tiers),
        max_sequences=wire.max_sequences,
        revision=revision,
        tokenizer_digest=wire.tokenizer_digest,
        takes_drain=wire.takes_drain,
        takes_batches=wire.takes_batches,
    )
