"""What a rank does for the engine, in the process that holds its part of weights and KV."""

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from disagg.errors import ConfigError
from disagg.messages.sampling import SampledToken
from disagg.scheduling.engine_steps import Failed, Scored
from disagg.scheduling.step import SequenceSlice
from disagg.workers import machine
from disagg.workers.engines.finite import NonFiniteError
from disagg.workers.engines.freed_memory import keep_freed_memory
from disagg.workers.engines.vllm.block_changes import BlockChanges
from disagg.workers.engines.vllm.kernel_checks import (
    block_tokens_of,
    head_refusal_of,
    refusal_of,
    takes_whole_blocks,
)
from disagg.workers.engines.vllm.runner import Runner
from disagg.workers.engines.vllm.shared_memory import drop_names
from disagg.workers.machine import Memory
from disagg.workers.options import Auto
from disagg.workers.pool_region import PoolRegion
from disagg.workers.rank_agent import RankAgent
from disagg.workers.rank_connections import RankAddress, accept_ranks
from disagg.workers.ranked_checksums import RankChecksums
from disagg.workers.tiers.rank_tiers import RankTiers

Drawn = dict[str, SampledToken | Scored | Failed]


class Rank:
    """Mixed into vLLM's worker class, see `RankWorker`: the engine calls these in every rank."""

    def disagg_drop_names(self) -> None:
        """See `drop_names`."""
        drop_names()

    def disagg_specs(self: Any, block_tokens: int) -> dict[str, Any]:
        """What each layer keeps, by name, in vLLM's words, with blocks of so many tokens."""
        cache = self.vllm_config.cache_config
        # vLLM has raised them so that one layer's page is as large as one layer's state.
        cache.block_size, cache.mamba_page_size_padded = block_tokens, None
        specs: dict[str, Any] = self.get_kv_cache_spec()
        return specs

    def disagg_block_tokens(self: Any, given: int | Auto) -> int | ConfigError:
        """Tokens of a block that the kernels take, or why they do not take the given ones."""
        with set_current_vllm_config(self.vllm_config):  # it decides what some kernels take
            return block_tokens_of(
                self.vllm_config.compilation_config.static_forward_context, given
            )

    def disagg_refusal(self: Any, specs: Mapping[str, Any]) -> ConfigError | None:
        """Why what vLLM chose cannot compute this model, if so."""
        config = self.vllm_config
        with set_current_vllm_config(config):
            refusal = refusal_of(config.compilation_config.static_forward_context, specs)
        return refusal or head_refusal_of(self.model_runner.get_model(), config.model_config)

    def disagg_backends(self: Any, layers: Sequence[str]) -> set[str]:
        """What computes the attention of these layers."""
        modules = self.vllm_config.compilation_config.static_forward_context
        return {modules[name].get_attn_backend().get_name() for name in layers}

    def disagg_takes_whole_blocks(self: Any, specs: Mapping[str, Any]) -> bool:
        """See `takes_whole_blocks`."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return takes_whole_blocks(layers, specs)

    def disagg_memory(self: Any) -> Memory:
        """Of the device that holds the weights, with them in it."""
        return machine.device_memory(self.device.type)

    def disagg_attach(
        self: Any, layers: Sequence[str], num_blocks: int, block_bytes: int, num_parts: int
    ) -> tuple[str, PoolRegion]:
        """Take the runner over; returns the page format and where the KV lies."""
        keep_freed_memory()
        self.disagg_runner = Runner(self, layers, num_blocks, block_bytes, num_parts)
        pool = self.disagg_runner.pool
        self.disagg_region = PoolRegion(
            address=pool.data_ptr(),
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            memory_kind="VRAM" if pool.is_cuda else "DRAM",
            device_id=pool.get_device() if pool.is_cuda else 0,
            owner=None,  # this process's runner keeps it alive
            num_parts=num_parts,
        )
        return self.disagg_runner.page_format, self.disagg_region

    def disagg_run(
        self: Any, order: Any, slices: Mapping[str, SequenceSlice], changes: BlockChanges
    ) -> tuple[Drawn, str]:
        """Compute a step; returns its tokens by name, or why it fails as a whole."""
        try:
            with torch.inference_mode():
                return self.disagg_runner.run(order, slices, changes), ""
        except NonFiniteError as error:
            return {}, str(error)

    def disagg_connect(
        self: Any, agent_name: str, handle_bytes_max: int, address: RankAddress
    ) -> None:
        """Start this rank's NIXL agent."""
        self.disagg_agent = RankAgent(
            agent_name, self.rank, self.disagg_region, handle_bytes_max, address
        )

    def disagg_connect_checksums(self: Any, address: RankAddress) -> None:
        """Compute checksums of this rank's parts of blocks."""
        self.disagg_checksums = RankChecksums(self.rank, self.disagg_region, address)

    def disagg_connect_tiers(self: Any, address: RankAddress) -> None:
        """Wait for this rank's tiers to be named."""
        self.disagg_tiers = RankTiers(self.rank, self.disagg_region, address)


class Ranks:
    """All ranks of an engine, from the process that schedules.

    Args:
        executor: vLLM's, with the model loaded.
        num_ranks: of the engine; the only one is in this process.
        host: address of this host that the ranks reach.
    """

    def __init__(self, executor: Any, num_ranks: int, host: str) -> None:
        self._executor = executor
        self._host = host
        self.num_ranks = num_ranks
        self.num_blocks = 0

    def read_specs(self, block_tokens: int) -> dict[str, Any]:
        """See `Rank.disagg_specs`; the ranks' are equal."""
        specs: dict[str, Any] = self._call("disagg_specs", block_tokens)
        return specs

    def choose_block_tokens(self, given: int | Auto) -> int:
        """See `Rank.disagg_block_tokens`; raises ConfigError where the given ones do not fit."""
        answer: int | ConfigError = self._call("disagg_block_tokens", given)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def check(self, specs: Mapping[str, Any]) -> None:
        """Ask the kernels; raises ConfigError where there are none for these layers."""
        refusal: ConfigError | None = self._call("disagg_refusal", specs)
        if refusal is not None:
            raise refusal

    def backends(self, layers: Sequence[str]) -> set[str]:
        """See `Rank.disagg_backends`."""
        names: set[str] = self._call("disagg_backends", layers)
        return names

    def takes_whole_blocks(self, specs: Mapping[str, Any]) -> bool:
        """See `Rank.disagg_takes_whole_blocks`."""
        answer: bool = self._call("disagg_takes_whole_blocks", specs)
        return answer

    def memory(self) -> Memory:
        """Of the rank that has least left; as many blocks fit into each."""
        found: list[Memory] = self._executor.collective_rpc("disagg_memory")
        return min(found, key=lambda memory: memory.available_bytes)

    def attach(
        self, layers: Sequence[str], num_blocks: int, block_bytes: int, num_parts: int
    ) -> str:
        """Take the runners over; returns their page format."""
        self.num_blocks = num_blocks
        page_format: str
        page_format, self._region = self._call(
            "disagg_attach", layers, num_blocks, block_bytes, num_parts
        )
        return page_format

    @property
    def region(self) -> "PoolRegion | Ranks":
        """The KV memory as transports take it."""
        return self if self.num_ranks > 1 else self._region

    @property
    def runner(self) -> Runner:
        """The only rank's."""
        runner: Runner = self._executor.driver_worker.worker.disagg_runner
        return runner

    def run(
        self, order: Any, slices: Mapping[str, SequenceSlice], changes: BlockChanges
    ) -> tuple[Drawn, str]:
        """See `Rank.disagg_run`.

        Raises:
            RuntimeError: the ranks drew different tokens; each has its own in its batch.
        """
        results: Sequence[tuple[Drawn, str]] = self._executor.collective_rpc(
            "disagg_run", args=(order, slices, changes)
        )
        first, *others = results
        if any(_token_ids(one) != _token_ids(first) for one in others):
            raise RuntimeError("the ranks drew different tokens")
        return first

    def connect(self, agent_name: str, handle_bytes_max: int) -> "Sequence[Connection[Any, Any]]":
        """See `RankedPool`."""
        return accept_ranks(
            self.num_ranks,
            self._host,
            lambda address: self._call("disagg_connect", agent_name, handle_bytes_max, address),
        )

    def connect_checksums(self) -> "Sequence[Connection[Any, Any]]":
        """See `RankedPool`."""
        return accept_ranks(
            self.num_ranks,
            self._host,
            lambda address: self._call("disagg_connect_checksums", address),
        )

    def connect_tiers(self) -> "Sequence[Connection[Any, Any]]":
        """See `RankedPool`."""
        return accept_ranks(
            self.num_ranks,
            self._host,
            lambda address: self._call("disagg_connect_tiers", address),
        )

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank; returns the first one's result."""
        return self._executor.collective_rpc(method, args=arguments)[0]


def _token_ids(result: tuple[Drawn, str]) -> dict[str, int]:
    drawn, _ = result
    sampled = {n: one.sampled if isinstance(one, Scored) else one for n, one in drawn.items()}
    return {name: one.token_id for name, one in sampled.items() if isinstance(one, SampledToken)}
