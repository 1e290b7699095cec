"""Chooses the tools that the model sees.

A tool with `defer_loading` is hidden until the conversation names it: by a reference of the client's tool search, by a
call, or by `tool_choice`. It then comes after the other tools, so that cached prefixes of the prompt stay valid.
"""

from collections.abc import Iterator

from baton.gateway.http.anthropic.blocks import (
    Block,
    ToolAddition,
    ToolReference,
    ToolResult,
    ToolSearchResult,
    ToolUse,
)
from baton.gateway.http.anthropic.models import CountTokensRequest
from baton.gateway.http.anthropic.tools import ClientTool, OneTool, OwnTool, ServerTool, Tool

_TOOL_SEARCH = "tool_search_tool_"


def runnable(tools: list[Tool] | None) -> list[OwnTool | ClientTool]:
    """Returns the tools that the client runs."""
    return [tool for tool in tools or () if isinstance(tool, OwnTool | ClientTool)]


def searched_by_server(tools: list[Tool] | None) -> bool:
    """Whether Anthropic's servers would search the hidden tools. Nobody does here, so none is hidden."""
    return any(isinstance(tool, ServerTool) and tool.type.startswith(_TOOL_SEARCH) for tool in tools or ())


def visible(request: CountTokensRequest) -> list[OwnTool | ClientTool]:
    """Returns the tools that are part of the prompt."""
    tools = runnable(request.tools)
    hidden = {tool.name: tool for tool in tools if tool.defer_loading}
    if not hidden or searched_by_server(request.tools):
        return tools
    named = dict.fromkeys(_named(request))
    return [
        *(tool for tool in tools if not tool.defer_loading),
        *(hidden[name] for name in named if name in hidden),
    ]


def _named(request: CountTokensRequest) -> Iterator[str]:
    """Yields the names of tools in the conversation, from its beginning on."""
    for turn in request.messages:
        for block in turn.content if isinstance(turn.content, list) else ():
            yield from _names_in(block)
    if isinstance(request.tool_choice, OneTool):
        yield request.tool_choice.name


def _names_in(block: Block) -> Iterator[str]:
    if isinstance(block, ToolUse):
        yield block.name
    elif isinstance(block, ToolAddition):
        yield block.tool.name
    elif isinstance(block, ToolSearchResult):
        yield from (reference.tool_name for reference in block.content.tool_references)
    elif isinstance(block, ToolResult) and isinstance(block.content, list):
        yield from (each.tool_name for each in block.content if isinstance(each, ToolReference))
