"""What a step says of prompts, cut into messages of bounded size."""

from collections.abc import Iterator, Sequence

from disagg.messages.outputs import (
    PROMPT_LOGPROBS_PER_MESSAGE_MAX,
    PromptLogprobs,
    SequenceOutput,
    StepOutputs,
)


def step_outputs(
    outputs: Sequence[SequenceOutput],
    scored: Sequence[PromptLogprobs],
    numbers_max: int = PROMPT_LOGPROBS_PER_MESSAGE_MAX,
) -> Iterator[StepOutputs]:
    """A step's messages to the router; none where it has nothing to say.

    Args:
        outputs: tokens; all in the last message, so that what is said of a prompt comes before.
        scored: of prompts.
        numbers_max: log-probabilities in one message; a single token's are never divided.
    """
    held: list[PromptLogprobs] = []
    room = numbers_max
    for one in scored:
        first = 0
        for index, entry in enumerate(one.logprobs):
            size = 1 + len(entry.top)
            if size > room and (index > first or held):
                if index > first:
                    held.append(_stretch(one, first, index))
                yield StepOutputs((), tuple(held))
                held, first, room = [], index, numbers_max
            room -= size
        held.append(_stretch(one, first, len(one.logprobs)))
    if outputs or held:
        yield StepOutputs(tuple(outputs), tuple(held))


def _stretch(one: PromptLogprobs, first: int, end: int) -> PromptLogprobs:
    return PromptLogprobs(one.key, one.position + first, one.logprobs[first:end])
