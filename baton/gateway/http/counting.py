"""Renders and tokenizes a conversation."""

from baton.gateway.serving.preparation import render, size_of_chat
from baton.gateway.serving.serving import Serving
from baton.gateway.text.chat.types import ChatRequest


async def encode_chat(serving: Serving, chat: ChatRequest, *, is_request: bool = False) -> list[int]:
    """Returns a conversation's token ids.

    Renders in another process and tokenizes in a thread, so that a long conversation delays no other request's tokens.

    Args:
        is_request: see `Serving.encode`.

    Raises:
        InvalidRequest: the template refuses the conversation.
    """
    prepared = await render(chat, serving.model, serving.texts, size_bytes=size_of_chat(chat))
    return await serving.encode(prepared.to_encode, add_special_tokens=False, is_request=is_request)
