"""A conversation's tokens."""

import asyncio

from gateway.chat.types import ChatRequest
from gateway.serving import Serving


async def encode_chat(serving: Serving, chat: ChatRequest, *, is_request: bool = False) -> list[int]:
    """Renders and tokenizes in a thread, so that a long conversation delays no other request's tokens.

    Args:
        is_request: as in `Serving.encode`.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    prepared = await asyncio.to_thread(serving.model.chat.prepare, chat)
    return await serving.encode(prepared.prompt, add_special_tokens=False, is_request=is_request)
