"""Names the accepted parts of a request that have no effect, for warnings in the answer's headers. Pure."""

from collections.abc import Iterator

from baton.gateway.http.anthropic.blocks import Block, ResultPicture, ServerBlock, ToolResult
from baton.gateway.http.anthropic.models import ContextEdit, CountTokensRequest
from baton.gateway.http.anthropic.tool_loading import runnable, searched_by_server
from baton.gateway.http.anthropic.tools import ServerTool

_NAMES_MAX = 5  # in one warning


def without_effect(request: CountTokensRequest) -> list[str]:
    """Returns a sentence for each kind of part that is served without effect."""
    return [*_of_tools(request), *_of_messages(request), *_of_fields(request)]


def _of_tools(request: CountTokensRequest) -> Iterator[str]:
    tools = request.tools or ()
    if left_out := [tool.type for tool in tools if isinstance(tool, ServerTool)]:
        yield f"tools: nobody runs {_list(left_out)} here, so the model does not see it"
    if searched_by_server(request.tools) and any(tool.defer_loading for tool in runnable(request.tools)):
        yield "tools: defer_loading has no effect, because nobody searches the tools here"
    if never := [
        tool.name for tool in runnable(request.tools) if tool.allowed_callers and "direct" not in tool.allowed_callers
    ]:
        yield f"tools: allowed_callers of {_list(never)} have no effect: the model calls every tool itself"


def _of_messages(request: CountTokensRequest) -> Iterator[str]:
    found = [
        f"messages[{index}].content[{position}]{where} ({kind})"
        for index, turn in enumerate(request.messages)
        if isinstance(turn.content, list)
        for position, block in enumerate(turn.content)
        for where, kind in _left_out(block)
    ]
    if found:
        yield f"left out of the prompt: {_list(found)}"


def _left_out(block: Block) -> Iterator[tuple[str, str]]:
    """Yields the place within the block, and the type, of what the model does not see."""
    if isinstance(block, ServerBlock):
        yield "", block.type
    elif isinstance(block, ToolResult) and isinstance(block.content, list):
        for index, each in enumerate(block.content):
            if isinstance(each, ResultPicture):
                yield f".content[{index}]", each.type


def _of_fields(request: CountTokensRequest) -> Iterator[str]:
    if request.context_management is not None:
        edits = [edit.type for edit in request.context_management.edits if not _keeps_all(edit)]
        if edits:
            yield f"context_management: {_list(edits)} has no effect, all messages are in the prompt"
    if request.mcp_servers:
        yield f"mcp_servers: nobody asks {_list([server.name for server in request.mcp_servers])} for tools"
    if request.speed == "fast":
        yield "speed: there is one speed"
    if request.output_config is not None and request.output_config.task_budget is not None:
        yield "output_config.task_budget: tokens are limited by max_tokens only"
    for name in ("container", "diagnostics", "fallbacks"):
        if getattr(request, name):
            yield f"{name} has no effect"


def _keeps_all(edit: ContextEdit) -> bool:
    """Whether the edit asks for what happens anyway: all reasoning goes to the model's template."""
    keep = edit.keep.get("type") if isinstance(edit.keep, dict) else edit.keep
    return edit.type.startswith("clear_thinking_") and keep == "all"


def _list(names: list[str]) -> str:
    more = len(names) - _NAMES_MAX
    return ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
