"""The answers of ``/v1/responses``: one object, or events that build it up."""

from typing import Any

from disagg.errors import DisaggError
from disagg.messages.outputs import FinishReason
from disagg.router.message_parts.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
)
from disagg.router.openai.answer import Answer
from disagg.router.openai.message_fields import MessageFields, call_id
from disagg.router.openai.responses_request import ResponsesRequest
from disagg.router.openai.sse import to_json
from disagg.router.text_stream import Piece

Event = dict[str, Any]


class ResponsesFormat:
    """Bodies and events of ``response``."""

    done = b""

    def __init__(self, answer: Answer, request: ResponsesRequest, fields: MessageFields) -> None:
        self._answer = answer
        self._request = request
        self._fields = fields
        self._items = _Items(answer.response_id)
        self._finish_reason = ""
        self._num_events = 0
        self._num_reasoning_tokens = 0

    def first_chunk(self) -> bytes:
        """The answer is there, with nothing in it."""
        response = self._response("in_progress", None)
        kinds = ("response.created", "response.in_progress")
        return self._events([{"type": kind, "response": response} for kind in kinds])

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The events of a piece of the only choice."""
        return self._events(self._take(piece))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event: the whole answer."""
        response = self.body(usage)
        return self._events([{"type": f"response.{response['status']}", "response": response}])

    def error_chunk(self, error: DisaggError) -> bytes:
        """The last event of an answer that could not be completed."""
        response = self._response("failed", None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._events([{"type": "response.failed", "response": response}])

    def add(self, index: int, piece: Piece) -> None:
        """Collect a piece of an answer that is not streamed."""
        self._take(piece)

    def body(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        return self._response(self._status(), usage)

    def _take(self, piece: Piece) -> list[Event]:
        self._finish_reason = piece.finish_reason
        parts = self._fields.parts(piece)
        if any(isinstance(part, Reasoning) for part in parts):
            self._num_reasoning_tokens += len(piece.token_ids)
        events = self._items.take(parts)
        return events + self._items.close(self._status()) if piece.finish_reason else events

    def _status(self) -> str:
        cut = self._finish_reason == FinishReason.LENGTH.value
        return "incomplete" if cut else "completed"

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        request = self._request
        named = request.model_dump(
            by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice", "reasoning"}
        )
        response: dict[str, Any] = {
            "id": self._answer.response_id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._answer.model,
            "output": [*self._items.items],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": named.get("reasoning", {"effort": None, "summary": None}),
            "store": False,
            "temperature": request.temperature,
            "text": named.get("text", {"format": {"type": "text"}}),
            "tool_choice": named.get("tool_choice", "auto"),
            "tools": named.get("tools", []),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        if usage is not None:
            response["usage"] = {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            }
        return response

    def _events(self, events: list[Event]) -> bytes:
        shown = []
        for event in events:
            numbered = event | {"sequence_number": self._num_events}
            self._num_events += 1
            shown.append(b"event: " + event["type"].encode() + b"\ndata: " + to_json(numbered))
        return b"".join(text + b"\n\n" for text in shown)


class _Items:
    """The output of one answer: an item for all that it thinks or says in one go, one per call."""

    def __init__(self, answer_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._answer_id = answer_id
        self._open: dict[str, Any] | None = None
        self._call = -1

    def take(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._says("message", "output_text", text)
                case Reasoning(text):
                    events += self._says("reasoning", "reasoning_text", text)
                case CallStart(index, name):
                    events += self._opens(
                        {
                            "type": "function_call",
                            "id": f"fc_{self._answer_id}_{index}",
                            "call_id": call_id(self._answer_id, index),
                            "name": name,
                            "arguments": "",
                            "status": "in_progress",
                        }
                    )
                case CallArguments(_, text):
                    item = self._last("function_call")
                    item["arguments"] += text
                    events.append(self._event("function_call_arguments.delta", delta=text))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """The item that is open is complete, or cut off."""
        item, self._open = self._open, None
        if item is None:
            return []
        if item["type"] == "function_call":
            done: dict[str, Any] = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("function_call_arguments.done", **done)]
        else:
            part = item["content"][0]
            at: dict[str, Any] = {"content_index": 0}
            events = [
                self._event(f"{_spoken(part)}.done", text=part["text"], **_logprobs(part), **at),
                self._event("content_part.done", part=dict(part), **at),
            ]
        item["status"] = status
        return [*events, self._event("output_item.done", of=None, item=_copy(item))]

    def _says(self, kind: str, part_kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            item: dict[str, Any] = {
                "type": kind,
                "id": f"{'msg' if kind == 'message' else 'rs'}_{self._answer_id}_{len(self.items)}",
                "status": "in_progress",
                "content": [],
            }
            if kind == "message":
                item["role"] = "assistant"
            else:
                item["summary"] = []
            events += self._opens(item)
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                part["annotations"] = []
            item["content"].append(part)
            events.append(self._event("content_part.added", content_index=0, part=dict(part)))
        part = self._last(kind)["content"][0]
        part["text"] += text
        delta = self._event(
            f"{_spoken(part)}.delta", content_index=0, delta=text, **_logprobs(part)
        )
        return [*events, delta]

    def _opens(self, item: dict[str, Any]) -> list[Event]:
        closed = self.close()
        self.items.append(item)
        self._open = item
        return [*closed, self._event("output_item.added", of=None, item=_copy(item))]

    def _last(self, kind: str) -> dict[str, Any]:
        if self._open is None or self._open["type"] != kind:
            raise AssertionError(f"no {kind} is open")
        return self._open

    def _event(self, kind: str, of: str | None = "item", **fields: Any) -> Event:
        event: Event = {"type": f"response.{kind}", "output_index": len(self.items) - 1}
        if of is not None:
            event["item_id"] = self.items[-1]["id"]
        return event | fields


def _spoken(part: dict[str, Any]) -> str:
    return str(part["type"])


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    return {"logprobs": []} if part["type"] == "output_text" else {}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | ({"content": [dict(p) for p in item["content"]]} if "content" in item else {})
