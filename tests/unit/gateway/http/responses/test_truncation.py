"""Which turns of a conversation are left out so that it fits."""

from collections.abc import Sequence

from baton.gateway.http.responses.routes import fit
from baton.gateway.text.chat.types import Json

SYSTEM = {"role": "system", "content": "s"}


def turn(number: int) -> list[Json]:
    return [
        {"role": "user", "content": f"u{number}"},
        {"role": "assistant", "tool_calls": [{"id": f"c{number}"}]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": "r"},
        {"role": "assistant", "content": f"a{number}"},
    ]


async def one_token_each(messages: Sequence[Json]) -> int:
    return len(messages)


async def kept(messages: Sequence[Json], tokens_max: int) -> list[Json]:
    return list(await fit(messages, one_token_each, tokens_max=tokens_max))


async def test_what_fits_stays_whole() -> None:
    talk = [SYSTEM, *turn(0), *turn(1)]
    assert await kept(talk, 9) == talk


async def test_the_oldest_turns_go_first_and_whole() -> None:
    talk = [SYSTEM, *turn(0), *turn(1), *turn(2), {"role": "user", "content": "now"}]
    assert await kept(talk, 13) == [SYSTEM, *turn(1), *turn(2), talk[-1]]
    assert await kept(talk, 10) == [SYSTEM, *turn(1), *turn(2), talk[-1]]
    assert await kept(talk, 9) == [SYSTEM, *turn(2), talk[-1]]
    assert await kept(talk, 2) == [SYSTEM, talk[-1]]


async def test_one_turn_always_stays() -> None:
    assert await kept([SYSTEM, *turn(0), *turn(1)], 1) == [SYSTEM, *turn(1)]
    assert await kept(turn(0), 1) == turn(0)
    assert await kept([SYSTEM], 0) == [SYSTEM]


async def test_a_long_conversation_is_counted_a_few_times() -> None:
    counted = 0

    async def count(messages: Sequence[Json]) -> int:
        nonlocal counted
        counted += 1
        return len(messages)

    talk = [message for number in range(1000) for message in turn(number)]
    assert len(await fit(talk, count, tokens_max=402)) == 400
    assert counted <= 12
