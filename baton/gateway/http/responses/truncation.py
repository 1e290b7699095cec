"""`truncation: auto`: the oldest turns of a conversation are left out until it fits. Pure but for the counting."""

from collections.abc import Awaitable, Callable, Sequence

from baton.gateway.text.chat.types import Json

Count = Callable[[Sequence[Json]], Awaitable[int]]


async def fit(messages: Sequence[Json], count: Count, *, tokens_max: int) -> Sequence[Json]:
    """The messages, or system messages at their start and as many of the last turns as have room; at least one turn.

    A turn begins with a message of the user, so no output of a tool loses its call.
    """
    if await count(messages) <= tokens_max:
        return messages
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [index for index, message in enumerate(messages) if index > first and message["role"] == "user"]
    if not turns:
        return messages
    low, high = 0, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        if await count([*messages[:first], *messages[turns[middle] :]]) <= tokens_max:
            high = middle
        else:
            low = middle + 1
    return [*messages[:first], *messages[turns[low] :]]
