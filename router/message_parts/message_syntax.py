"""How the served model writes messages: read from its answers, forced by grammars."""

from collections.abc import Callable
from typing import Any

from disagg.errors import ConfigError
from disagg.grammar.marked_grammars import MarkedGrammar
from disagg.router.message_parts import harmony, thinking
from disagg.router.message_parts.call_parser import CallParser, Schemas
from disagg.router.message_parts.formats import (
    AUTO,
    HARMONY,
    NONE,
    REASONING_EVIDENCE,
    REASONING_MARKS,
    THINK,
    TOOL_FORMATS,
    family_of,
)
from disagg.router.message_parts.harmony import HarmonyParser
from disagg.router.message_parts.message_parser import MessageParser
from disagg.router.message_parts.thinking import ThinkingParser


class MessageSyntax:
    """The formats of one checkpoint.

    Attributes:
        tools: name of the format of calls; "" where none is known.
        reasoning: name of the format of reasoning; "" where there is none.
        marks: what its special tokens may be that a parser needs to see.
    """

    def __init__(
        self,
        model_type: str,
        template: str,
        token_id: Callable[[str], int | None],
        *,
        tool_call_parser: str = AUTO,
        reasoning_parser: str = AUTO,
    ) -> None:
        """Choose the formats of a model.

        Args:
            model_type: of config.json.
            template: the checkpoint's chat template, with tools where it has several.
            token_id: which token a mark is, if it is one.
            tool_call_parser: a name in `TOOL_FORMATS`, ``none``, or ``auto``: by family.
            reasoning_parser: a name in `REASONING_MARKS`, ``none``, or ``auto``: by family and
                template.

        Raises:
            ConfigError: one of the two is ``harmony`` and the other one is of another kind.
        """
        family = family_of(model_type)
        tools = family.tools if family else ""
        reasoning = family.reasoning if family else ""
        if reasoning and REASONING_EVIDENCE[reasoning] not in template:
            reasoning = ""
        self.tools = _chosen(tool_call_parser, tools)
        self.reasoning = _chosen(reasoning_parser, reasoning)
        if HARMONY in (self.tools, self.reasoning) and not (
            {self.tools, self.reasoning} <= {HARMONY, ""}
        ):
            raise ConfigError(
                f"model.reasoning_parser: {self.reasoning or NONE} does not go with"
                f" model.tool_call_parser {self.tools or NONE}",
                param="model.reasoning_parser",
            )
        self._template = template
        self._token_id = token_id
        marks = REASONING_MARKS.get(self.reasoning, ())
        self.marks = (*marks, *(TOOL_FORMATS[self.tools].marks if self.tools else ()))

    def parser(self, prompt_end: str, schemas: Schemas) -> MessageParser | None:
        """What reads one answer; None where there is nothing to find in it.

        Args:
            prompt_end: the last characters of the prompt, special tokens by name.
            schemas: the tools that may be called.
        """
        if self.reasoning == HARMONY or (self.tools == HARMONY and schemas):
            with_reasoning = self.reasoning == HARMONY
            return MessageParser(None, HarmonyParser(schemas, with_reasoning=with_reasoning))
        reads = None
        if self.reasoning == THINK and not _has_thought(prompt_end):
            reads = ThinkingParser(open_in_prompt=_is_thinking(prompt_end))
        syntax = TOOL_FORMATS[self.tools].syntax if self.tools and schemas else None
        calls = CallParser(syntax(), schemas) if syntax else None
        return MessageParser(reads, calls) if reads or calls else None

    def grammar(
        self,
        prompt_end: str,
        schemas: Schemas,
        *,
        several: bool,
        json_schema: dict[str, Any] | None,
    ) -> str:
        """The grammar of answers that are calls of these tools or JSON by a schema, or either.

        Reasoning may come first where the model has it. See ``SamplingParams.grammar``.
        """
        to = MarkedGrammar(self._token_id)
        bodies = []
        if schemas:
            forced = TOOL_FORMATS[self.tools].forced(self._template)
            bodies.append(forced(to, schemas, several=several))
        is_harmony = HARMONY in (self.tools, self.reasoning)
        if json_schema is not None:
            # Only where the parser is on is the channel taken off again.
            shown = self.reasoning == HARMONY or (is_harmony and schemas)
            final = [to.mark(harmony.CHANNEL), to.text("final"), to.mark(harmony.MESSAGE)]
            bodies.append(" ".join([*(final if shown else ()), to.json(json_schema)]))
        body = f"({' | '.join(bodies)})"
        if self.reasoning == HARMONY:
            thought = [
                to.mark(harmony.CHANNEL),
                to.text("analysis"),
                to.mark(harmony.MESSAGE),
                to.any_text_and(harmony.END),
                to.mark(harmony.START),
                to.text("assistant"),
            ]
            body = f"({' '.join(thought)})? {body}"
        elif self.reasoning == THINK and not _has_thought(prompt_end):
            thought = [to.any_text_and(thinking.THINK_END), to.line_breaks(2)]
            if _is_thinking(prompt_end):
                body = f"{' '.join(thought)} {body}"
            else:
                body = f"({' '.join([to.mark(thinking.THINK), *thought])})? {body}"
        return to.grammar(body)

    def reasons_first(self, prompt_end: str) -> bool:
        """Whether what comes before or around an answer's body is more than the body."""
        return self.reasoning == HARMONY or (
            self.reasoning == THINK and not _has_thought(prompt_end)
        )


def _chosen(setting: str, usual: str) -> str:
    if setting == AUTO:
        return usual
    return "" if setting == NONE else setting


def _is_thinking(prompt_end: str) -> bool:
    return prompt_end.rstrip().endswith(thinking.THINK)


def _has_thought(prompt_end: str) -> bool:
    return prompt_end.rstrip().endswith(thinking.THINK_END)
