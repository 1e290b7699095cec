"""Writes the object `response` with its output items, whole or at the beginning of a stream. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson
from pydantic import BaseModel

from baton.core.error_codes import code_of
from baton.core.errors import BatonError, ContextOverflow, InvalidRequest, Overloaded
from baton.gateway.http.answer_parts import AnswerPart, OutputParts
from baton.gateway.http.custom_input import whole_text
from baton.gateway.http.errors import retry_after_s
from baton.gateway.http.responses.client_tools import CLIENT_TOOLS
from baton.gateway.http.responses.items import sealed
from baton.gateway.http.responses.models import ENCRYPTED, ResponsesRequest
from baton.gateway.http.responses.tool_table import ShownTool, ToolTable
from baton.gateway.http.responses.tools import FunctionTool, Tool
from baton.gateway.http.responses.translate import Conversation
from baton.protos.v1 import common_pb2

Status = Literal["in_progress", "completed", "incomplete", "failed"]

_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"} | {
    tool.item_type: tool.id_prefix for tool in CLIENT_TOOLS.values()
}

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
    """Writes one `response` in its successive states. The constant fields are encoded once.

    Args:
        conversation: what the request was translated to; None: it has no tools.
        stored: whether the response can be had again.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        identity: Identity,
        conversation: Conversation | None = None,
        *,
        stored: bool = False,
    ) -> None:
        self.identity = identity
        self._tools = ToolTable() if conversation is None else conversation.tools
        self._raw_tool = None if conversation is None else conversation.raw_tool
        self._seals_reasoning = ENCRYPTED in (request.include or ())
        self._constant = orjson.dumps(_constant(request, identity, stored=stored))

    @property
    def id(self) -> str:
        return response_id(self.identity.key)

    def answer(self) -> OutputParts:
        """Returns an empty answer that keeps tokens if the response needs them."""
        return OutputParts(keeps_tokens=self.identity.write_logprobs is not None)

    def item_type(self, part: AnswerPart) -> str:
        """Returns the type of the output item that a part becomes."""
        tool = self._tool(part)
        if tool is None:
            return {"text": "message", "tool_call": "function_call"}.get(part.kind, part.kind)
        if tool.kind in CLIENT_TOOLS:
            return CLIENT_TOOLS[tool.kind].item_type
        return f"{tool.kind}_call" if tool.kind == "function" else "custom_tool_call"

    def has_json(self, part: AnswerPart) -> bool:
        """Whether a custom tool's call has its text as JSON, because the model wrote it as a function's arguments."""
        return self._raw_tool is None or part.name != self._raw_tool.shown_name

    def item(self, part: AnswerPart, status: Status) -> dict[str, Any]:
        """Returns the output item of a whole part."""
        kind, tool = self.item_type(part), self._tool(part)
        item: dict[str, Any] = {"id": self.item_id(part), "type": kind, "status": status}
        if kind == "message":
            return {**item, "role": "assistant", "content": [self.text_part(part.text, part.tokens)]}
        if kind == "reasoning":
            seal = {"encrypted_content": sealed(part.text)} if self._seals_reasoning else {}
            return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": part.text}], **seal}
        item["call_id"] = part.id
        if tool is not None and tool.kind in CLIENT_TOOLS:
            return {**item, **CLIENT_TOOLS[tool.kind].fields(_object(part.text))}
        if tool is None:
            return {**item, "name": part.name, "arguments": part.text}
        space = {} if tool.namespace is None else {"namespace": tool.namespace}
        if tool.kind == "custom":
            return {**item, "name": tool.name, **space, "input": self._custom_text(part)}
        return {**item, "name": tool.name, **space, "arguments": part.text}

    def item_id(self, part: AnswerPart) -> str:
        return f"{_ID_PREFIXES[self.item_type(part)]}_{self.identity.key}_{part.position}"

    def _tool(self, part: AnswerPart) -> ShownTool | None:
        return self._tools.find(part.name) if part.kind == "tool_call" else None

    def _custom_text(self, part: AnswerPart) -> str:
        return whole_text(part.text) if self.has_json(part) else part.text

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
        return self._write("failed", items, {"error": failure(error), "usage": None})

    def _write(self, status: Status, output: list[dict[str, Any]], rest: dict[str, Any]) -> bytes:
        changing = {"status": status, "error": None, "incomplete_details": None, "output": output, **rest}
        return self._constant[:-1] + b"," + orjson.dumps(changing)[1:]


def failure(error: BatonError) -> dict[str, str]:
    """Returns code and message of a failed response.

    Codex reads from the message of `rate_limit_exceeded` alone how long to wait, in these words.
    """
    code, wait_s = _failure_code(error), retry_after_s(error)
    if code != "rate_limit_exceeded" or wait_s is None:
        return {"code": code, "message": str(error)}
    return {"code": code, "message": f"{error}. Please try again in {max(1, math.ceil(wait_s))}s."}


def _failure_code(error: BatonError) -> str:
    """Returns a code from OpenAI's list. Codex shortens its conversation by the first one."""
    if isinstance(error, ContextOverflow):
        return code_of(error).openai_code
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"


def response_id(key: str) -> str:
    return f"resp_{key}"


def _object(arguments: str) -> dict[str, Any]:
    """Returns a call's arguments; empty if the output was cut inside them."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _constant(request: ResponsesRequest, identity: Identity, *, stored: bool) -> dict[str, Any]:
    given = request.model_dump(
        mode="json",
        by_alias=True,
        include={"instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "user"}
        | {"safety_identifier", "prompt_cache_key", "max_tool_calls"},
    )
    choice, text = request.tool_choice, request.text
    text_format = {"type": "text"} if text is None or text.format is None else text.format.model_dump(by_alias=True)
    return {
        "id": response_id(identity.key),
        "object": "response",
        "created_at": identity.created_at,
        "model": identity.model,
        **given,
        "tools": [_tool_json(tool) for tool in request.tools or ()],
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else _json(choice),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": text_format, "verbosity": text.verbosity if text is not None else None},
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "truncation": request.truncation or "disabled",
        "metadata": request.metadata or {},
        "store": stored,
        "background": False,
        "previous_response_id": request.previous_response_id,
        "service_tier": "default",
    }


_SECRETS = {"authorization", "headers"}  # of a hosted tool of type mcp
_FUNCTION_FIELDS = {"type", "name", "description", "parameters", "strict"}


def _tool_json(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(include=_FUNCTION_FIELDS) if isinstance(tool, FunctionTool) else _json(tool)


def _json(given: BaseModel) -> dict[str, Any]:
    return given.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_SECRETS)


def _usage(answer: OutputParts) -> dict[str, Any]:
    usage = answer.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
