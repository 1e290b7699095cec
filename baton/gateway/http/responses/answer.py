"""Writes the object `response` with its output items, whole or at the beginning of a stream. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from baton.core.errors import BatonError
from baton.gateway.http.answer_parts import AnswerPart, OutputParts
from baton.gateway.http.checking import Model
from baton.gateway.http.responses.models import ResponsesRequest
from baton.protos.v1 import common_pb2

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}
_ERROR_CODES = {"INVALID_REQUEST": "invalid_prompt", "OVERLOADED": "rate_limit_exceeded"}

WriteLogprobs = Callable[[Sequence[common_pb2.Token]], list[dict[str, Any]]]
WriteReceipt = Callable[[common_pb2.Receipt], dict[str, Any]]


@dataclass(frozen=True)
class Identity:
    """What a response contains besides its request and its answer.

    Attributes:
        key: part of the ids of the response and its items.
        model: the model's name, as the response shows it.
        created_at: Unix time in seconds.
        write_logprobs, write_receipt: format logprobs and receipt; None: the client wants none.
    """

    key: str
    model: str
    created_at: int
    write_logprobs: WriteLogprobs | None = None
    write_receipt: WriteReceipt | None = None


class ResponseObject:
    """Writes one `response` in its successive states. The constant fields are encoded once."""

    def __init__(self, request: ResponsesRequest, identity: Identity) -> None:
        self.identity = identity
        self._constant = orjson.dumps(_constant(request, identity))

    def answer(self) -> OutputParts:
        """Returns an empty answer that keeps tokens if the response needs them."""
        return OutputParts(keeps_tokens=self.identity.write_logprobs is not None)

    def item(self, part: AnswerPart, status: Status) -> dict[str, Any]:
        """Returns the output item of a whole part."""
        item_id = self.item_id(part)
        if part.kind == "text":
            content = [self.text_part(part.text, part.tokens)]
            return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}
        if part.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": part.text}]
            return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {
            "id": item_id,
            "type": "function_call",
            "call_id": part.id,
            "name": part.name,
            "arguments": part.text,
            "status": status,
        }

    def item_id(self, part: AnswerPart) -> str:
        return f"{_ID_PREFIXES[part.kind]}_{self.identity.key}_{part.position}"

    def text_part(self, text: str, tokens: Sequence[common_pb2.Token]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs(tokens)}

    def logprobs(self, tokens: Sequence[common_pb2.Token]) -> list[dict[str, Any]]:
        write = self.identity.write_logprobs
        return [] if write is None or not tokens else write(tokens)

    def begun(self) -> bytes:
        return self._write("in_progress", [], {"usage": None})

    def ended(self, answer: OutputParts) -> bytes:
        """Returns the completed response. If the output was truncated, response and last item are incomplete."""
        status: Status = "incomplete" if answer.truncated else "completed"
        items = [self.item(part, "completed") for part in answer.parts[:-1]]
        items += [self.item(part, status) for part in answer.parts[-1:]]
        rest: dict[str, Any] = {"usage": _usage(answer)}
        if answer.truncated:
            rest["incomplete_details"] = {"reason": "max_output_tokens"}
        if self.identity.write_receipt is not None:
            rest["baton"] = {"receipt": self.identity.write_receipt(answer.receipt)}
        return self._write(status, items, rest)

    def failed(self, answer: OutputParts, error: BatonError) -> bytes:
        items = [self.item(part, "incomplete") for part in answer.parts]
        failure = {"code": _ERROR_CODES.get(error.reason, "server_error"), "message": str(error)}
        return self._write("failed", items, {"error": failure, "usage": None})

    def _write(self, status: Status, output: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        changing = {"status": status, "error": None, "incomplete_details": None, "output": output, **rest}
        return self._constant[:-1] + b"," + orjson.dumps(changing)[1:]


def _constant(request: ResponsesRequest, identity: Identity) -> dict[str, Any]:
    given = request.model_dump(
        mode="json",
        by_alias=True,
        include={"instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "user"}
        | {"safety_identifier", "prompt_cache_key", "max_tool_calls"},
    )
    choice, text = request.tool_choice, request.text
    text_format = {"type": "text"} if text is None or text.format is None else text.format.model_dump(by_alias=True)
    return {
        "id": f"resp_{identity.key}",
        "object": "response",
        "created_at": identity.created_at,
        "model": identity.model,
        **given,
        "tools": [tool.model_dump(include=_TOOL_FIELDS) for tool in request.tools or ()],
        "tool_choice": choice.model_dump() if isinstance(choice, Model) else choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": text_format, "verbosity": text.verbosity if text is not None else None},
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "truncation": request.truncation or "disabled",
        "metadata": request.metadata or {},
        "store": False,
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
    }


_TOOL_FIELDS = {"type", "name", "description", "parameters", "strict"}


def _usage(answer: OutputParts) -> dict[str, Any]:
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
