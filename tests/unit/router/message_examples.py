"""What models of each family write, and the message it is: one row, one text."""

from dataclasses import dataclass, field
from typing import Any

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "time.now": {},
}
TEMPLATES = {
    "deepseek_v3": "{{ tools }}<think></think>```json",
    "gemma3_text": "{{ tools }}",
    "gpt_oss": "{{ tools }}<|channel|>",
    "llama4_text": "{{ tools }}",
    "nemotron_h": "{{ tools }}<think></think><TOOLCALL>",
    "qwen3_next": "{{ tools }}<think></think>",
}
"""What of a template counts, by model type."""


@dataclass(frozen=True)
class Example:
    model_type: str
    what: str
    text: str
    content: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    prompt_end: str = ""
    form: str = ""
    """What docs/api.md calls this way to write calls."""


PARIS = ("get_weather", {"city": "Paris", "days": 2})
NOW: tuple[str, Any] = ("time.now", {})
JSON = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
)
B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
C, S, D = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ARGS = '{"city": "Paris", "days": 2}'
HEAD = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"

EXAMPLES = [
    Example(
        "qwen3_next",
        "one call",
        f"<tool_call>\n{JSON}\n</tool_call>",
        calls=[PARIS],
        form="JSON in `<tool_call>`",
    ),
    Example(
        "qwen3_next",
        "text and two calls",
        f'Let me see.\n<tool_call>{JSON}</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": '
        '"time.now"}\n</tool_call>\n',
        "Let me see.\n",
        [PARIS, NOW],
    ),
    Example(
        "qwen3_next",
        "reasoning that the prompt began",
        f"Hm. <tool_call>?\n</think>\n\nSo:<tool_call>{JSON}</tool_call>",
        "So:",
        [PARIS],
        "Hm. <tool_call>?",
        "<|im_start|>assistant\n<think>\n",
    ),
    Example("qwen3_next", "reasoning", "<think>\na\n\nb\n</think>\n\nHi", "Hi", [], "a\n\nb"),
    Example(
        "qwen3_next",
        "none wanted",
        "<think> is a tag",
        "<think> is a tag",
        prompt_end="<think>\n\n</think>\n\n",
    ),
    Example("qwen3_next", "XML", XML, calls=[PARIS], form="XML in `<tool_call>`"),
    Example(
        "qwen3_next",
        "JSON is broken",
        "<tool_call>{name}</tool_call> x",
        "<tool_call>{name}</tool_call> x",
    ),
    Example(
        "qwen3_next",
        "no such tool",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ),
    Example(
        "qwen3_next",
        "a mark, then a call",
        f"<tool_call><tool_call>{JSON}</tool_call>",
        "<tool_call>",
        [PARIS],
    ),
    Example("qwen3_next", "blanks alone", " \n ", " \n "),
    Example(
        "nemotron_h",
        "a list",
        f'<TOOLCALL>[{JSON}, {{"name": "time.now", "arguments": {{}}}}]</TOOLCALL>',
        calls=[PARIS, NOW],
        form="a list in `<TOOLCALL>`",
    ),
    Example("nemotron_h", "XML", XML, calls=[PARIS], form="XML in `<tool_call>`"),
    Example(
        "nemotron_h",
        "reasoning",
        f"Hm.</think>\n<TOOLCALL>[{JSON}]</TOOLCALL>",
        calls=[PARIS],
        reasoning="Hm.",
        prompt_end="<think>\n",
    ),
    Example(
        "deepseek_v3",
        "fenced",
        f"Well.{B}{C}function{S}get_weather\n```json\n{ARGS}\n```{D}\n"
        f"{C}function{S}time.now\n```json\n{{}}\n```{D}{E}",
        "Well.",
        [PARIS, NOW],
        form="fenced JSON (V3, R1)",
    ),
    Example(
        "deepseek_v3",
        "plain (V3.1)",
        f"{B}{C}get_weather{S}{ARGS}{D}{C}time.now{S}{{}}{D}{E}",
        calls=[PARIS, NOW],
        form="JSON (V3.1)",
    ),
    Example(
        "deepseek_v3",
        "reasoning",
        f"<think>Hm.</think>{B}{C}get_weather{S}{ARGS}{D}{E}",
        calls=[PARIS],
        reasoning="Hm.",
    ),
    Example("deepseek_v3", "no name", f"{B}{C}{S}{ARGS}{D}{E}", f"{B}{C}{S}{ARGS}{D}{E}"),
    Example(
        "llama4_text",
        "Python",
        '[get_weather(city="Paris", days=2), time.now()]',
        calls=[PARIS, NOW],
        form="a list of Python calls",
    ),
    Example(
        "llama4_text",
        "no literal",
        "<|python_start|>[get_weather(days=1 + 1)]<|python_end|>",
        "<|python_start|>[get_weather(days=1 + 1)]<|python_end|>",
    ),
    Example(
        "llama4_text",
        "literals between marks",
        "<|python_start|>[get_weather(city='Paris', days=2)]<|python_end|>",
        calls=[PARIS],
        form="one in `<\\|python_start\\|>`",
    ),
    Example(
        "llama4_text",
        "JSON",
        f'{{"type": "function", "name": "get_weather", "parameters": {ARGS}}}; '
        '{"name": "time.now", "parameters": {}}',
        calls=[PARIS, NOW],
        form="JSON objects",
    ),
    Example("llama4_text", "a list that is none", "[1] is a list", "[1] is a list"),
    Example("llama4_text", "later in the text", "So: [time.now()]", "So: [time.now()]"),
    Example(
        "gemma3_text",
        "fenced Python",
        "Sure.\n```tool_code\ntime.now()\n```",
        "Sure.\n",
        [NOW],
        form="fenced Python",
    ),
    Example(
        "gemma3_text",
        "fenced JSON",
        f'```tool_call\n{{"name": "get_weather", "parameters": {ARGS}}}\n```',
        calls=[PARIS],
        form="fenced JSON",
    ),
    Example(
        "gemma3_text",
        "bare Python",
        "[get_weather(city='Paris', days=2)]",
        calls=[PARIS],
        form="a list of Python calls",
    ),
    Example(
        "gemma3_text",
        "code that is no call",
        "```python\nprint(1)\n```\nOK",
        "```python\nprint(1)\n```\nOK",
    ),
    Example(
        "gpt_oss",
        "analysis and answer",
        f"{ANALYSIS}<|channel|>final<|message|>Hello",
        "Hello",
        [],
        "Hm.",
    ),
    Example(
        "gpt_oss",
        "a call",
        f"{ANALYSIS}{HEAD}{ARGS}",
        "",
        [PARIS],
        "Hm.",
        form="channel `commentary`",
    ),
    Example(
        "gpt_oss",
        "a preamble",
        f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{HEAD}{ARGS}<|call|>",
        "Wait.",
        [PARIS],
    ),
    Example(
        "gpt_oss",
        "the recipient first",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGS}",
        "",
        [PARIS],
    ),
    Example("gpt_oss", "no messages", "plain <|text", "plain <|text"),
    Example(
        "gpt_oss",
        "another recipient",
        "<|channel|>commentary to=browser.open<|message|>{}",
        "<|channel|>commentary to=browser.open<|message|>{}",
    ),
]

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}[{{ call.id }}:{{ call.function.name }}:"
    "{{ call.function.arguments | tojson }}]{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if thinking %}<think>\n{% endif %}{% endif %}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": schema or {"type": "object"}},
    }
    for name, schema in SCHEMAS.items()
]
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
MAX_TOKENS = 1024
BODY: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS}
