"""A worker without an engine: it answers as a real one does, with tokens from a function."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from disagg.kv.hashing import BlockHasher, block_hash_key
from disagg.messages.identity import Incarnation
from disagg.messages.outputs import FinishReason, PromptLogprobs, SequenceOutput, StepOutputs
from disagg.messages.registration import DEFAULT_REVISION, Contract, GroupInfo, WorkerInfo
from disagg.messages.reports import PrefillReport
from disagg.messages.sampling import TokenLogprobs
from disagg.messages.session import ToRouterMessage
from disagg.messages.stats import WorkerStats
from disagg.messages.submit import Role, Submit

BLOCK_TOKENS = 4
HASH_KEY = "the secret of a cluster without secrets"
"""What a router needs as ``hash_key`` to take scripted workers in."""
HASHER = BlockHasher(block_hash_key(HASH_KEY, "fingerprint"), BLOCK_TOKENS)
"""Names blocks as that router does."""
PROMPT_LOGPROBS_PER_MESSAGE = 3
CONTRACT = Contract(
    "fingerprint", "float32", ("full",), "pages", 1024, BLOCK_TOKENS, HASHER.scheme, 1, 1
)
READY = WorkerStats(0, 0, 0, 100, 100, 0, 0, 0, 0, ready=True, counters=(("steps", 3),))


@dataclass(slots=True)
class ScriptedWorker:
    """The token at absolute position p is ``token(p)``, whichever worker computes it.

    Attributes:
        incarnation: which life of which worker it is.
        token: the token at a position.
        role: ``prefill``, ``decode`` or ``both``.
        address: where it would be reached.
        hit_tokens: what it reports as found in its cache.
        tokens_per_step: tokens in each `StepOutputs`.
        contract: of its registration.
        max_model_tokens: of its registration.
        revision: of its registration.
        tokenizer_digest: of its registration.
    """

    incarnation: Incarnation
    token: Callable[[int], int]
    role: str = "both"
    address: str = "127.0.0.1:1"
    hit_tokens: int = 0
    tokens_per_step: int = 1
    contract: Contract = CONTRACT
    max_model_tokens: int = 512
    revision: str = DEFAULT_REVISION
    tokenizer_digest: str = ""

    @property
    def info(self) -> WorkerInfo:
        """Its registration."""
        return WorkerInfo(
            incarnation=self.incarnation,
            address=self.address,
            role=self.role,
            model="tiny",
            contract=self.contract,
            groups=(GroupInfo("full_attention", BLOCK_TOKENS, 0, 1, 1024),),
            max_model_tokens=self.max_model_tokens,
            handover_tokens_max=self.max_model_tokens,
            num_blocks=100,
            revision=self.revision,
            tokenizer_digest=self.tokenizer_digest,
        )

    def answers(self, submit: Submit) -> Iterator[ToRouterMessage]:
        """What it sends for one part: a report if it prefills, then one message per step.

        A prefill part sends token 0 and is over; the others go on to the end of the request.
        """
        start, sampling = len(submit.token_ids), submit.sampling
        num_best = sampling.num_prompt_logprobs
        if num_best is not None and submit.role is not Role.DECODE:
            for first in range(1, sampling.num_prompt_tokens, PROMPT_LOGPROBS_PER_MESSAGE):
                end = min(first + PROMPT_LOGPROBS_PER_MESSAGE, sampling.num_prompt_tokens)
                scores = tuple(prompt_logprobs_of(at, num_best) for at in range(first, end))
                yield StepOutputs((), (PromptLogprobs(submit.key, first, scores),))
        if submit.role is not Role.DECODE:
            hits = self.hit_tokens
            yield PrefillReport(submit.key, start, hits, start - hits)
        end = start + (1 if submit.role is Role.PREFILL else sampling.max_tokens)
        position, finish = start, FinishReason.NONE
        while position < end and finish is FinishReason.NONE:
            size = min(self.tokens_per_step, end - position)
            ids = [self.token(p) for p in range(position, position + size)]
            stops = [n for n, token_id in enumerate(ids) if token_id in sampling.stop_token_ids]
            if stops:
                ids, finish = ids[: stops[0] + 1], FinishReason.STOP
            elif position + size == start + sampling.max_tokens:
                finish = FinishReason.LENGTH
            logprobs: tuple[TokenLogprobs, ...] = ()
            if sampling.num_logprobs is not None:
                logprobs = tuple(logprobs_of(i, sampling.num_logprobs) for i in ids)
            yield StepOutputs((SequenceOutput(submit.key, position, tuple(ids), logprobs, finish),))
            position += size


def prompt_logprobs_of(position: int, num_logprobs: int) -> TokenLogprobs:
    """Of a prompt's token: it is none of the best, which are those from 10 on."""
    best = tuple((10 + i, -0.5 - i) for i in range(num_logprobs))
    return TokenLogprobs(-100.0 - position, best, num_logprobs + position)


def logprobs_of(token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Of a scripted token: -0.5, and the token ids after it one less each."""
    return TokenLogprobs(-0.5, tuple((token_id + i, -0.5 - i) for i in range(num_logprobs)))
