"""The formats there are, and which model family writes which.

A family's formats count only where the checkpoint's chat template has them: a model that was not
trained on them would find its text misread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from disagg.router.message_parts import (
    bare_calls,
    deepseek_calls,
    forced_calls,
    harmony,
    tagged_calls,
    thinking,
)
from disagg.router.message_parts.call_parser import CallSyntax
from disagg.router.message_parts.forced_calls import ForcedCalls

AUTO, NONE = "auto", "none"
GEMMA, HARMONY, THINK = "gemma", "harmony", "think"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls of tools are read, and how they are forced."""

    syntax: Callable[[], CallSyntax] | None
    """None: `HarmonyParser` reads them with all the rest."""
    forced: Callable[[str], ForcedCalls]
    """By the text of the chat template."""
    marks: tuple[str, ...]
    """Tokens of the format that a checkpoint may call special."""


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek": ToolFormat(
        deepseek_calls.DeepSeekCalls,
        lambda template: (
            forced_calls.deepseek_fenced
            if deepseek_calls.FENCE in template
            else forced_calls.deepseek
        ),
        (
            deepseek_calls.BLOCK,
            deepseek_calls.BLOCK_END,
            deepseek_calls.CALL,
            deepseek_calls.SEPARATOR,
            deepseek_calls.CALL_END,
        ),
    ),
    GEMMA: ToolFormat(bare_calls.GemmaCalls, lambda _: forced_calls.gemma, ()),
    HARMONY: ToolFormat(None, lambda _: forced_calls.harmony_message, harmony.MARKS),
    "hermes": ToolFormat(
        tagged_calls.TaggedCalls,
        lambda template: (
            forced_calls.hermes_list if tagged_calls.LIST in template else forced_calls.hermes
        ),
        (tagged_calls.CALL, tagged_calls.CALL_END, tagged_calls.LIST, tagged_calls.LIST_END),
    ),
    "llama": ToolFormat(
        bare_calls.LlamaCalls,
        lambda _: forced_calls.llama,
        (bare_calls.PYTHON, bare_calls.PYTHON_END),
    ),
}
REASONING_MARKS: Mapping[str, tuple[str, ...]] = {
    HARMONY: harmony.MARKS,
    THINK: (thinking.THINK, thinking.THINK_END),
}
REASONING_EVIDENCE: Mapping[str, str] = {HARMONY: harmony.CHANNEL, THINK: thinking.THINK_END}
"""What a chat template has of a format that its model writes."""

TOOL_PARSER_NAMES = (AUTO, NONE, *sorted(TOOL_FORMATS))
REASONING_PARSER_NAMES = (AUTO, NONE, *sorted(REASONING_MARKS))


@dataclass(frozen=True, slots=True)
class Family:
    """Formats by name; "" where it has none.

    Attributes:
        model_types: as in config.json; a ``_text`` behind one makes no difference.
    """

    name: str
    model_types: tuple[str, ...]
    tools: str
    reasoning: str = ""


FAMILIES = (
    Family("DeepSeek-V2, V3, R1, V3.1", ("deepseek_v2", "deepseek_v3"), "deepseek", THINK),
    Family("Gemma 2, Gemma 3, Gemma 3n", ("gemma2", "gemma3", "gemma3n"), GEMMA),
    Family("gpt-oss", ("gpt_oss",), HARMONY, HARMONY),
    Family("Llama 3, Llama 4", ("llama", "llama4"), "llama"),
    Family("Nemotron-H", ("nemotron_h",), "hermes", THINK),
    Family(
        "Qwen2.5, Qwen3, Qwen3-Next, Qwen3.5",
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
        "hermes",
        THINK,
    ),
)


def family_of(model_type: str) -> Family | None:
    """The family of a ``model_type`` of config.json."""
    plain = model_type.removesuffix("_text")
    return next((family for family in FAMILIES if plain in family.model_types), None)
