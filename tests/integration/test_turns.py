"""Conversations turn by turn, on one node of the demo model."""

from bench.turns import Script, play
from tests.integration.cluster import LLAMA, Machines

SCRIPT = Script(sessions=3, turns=3, document=100, question=20, answer=8)


async def test_each_turn_goes_on_from_all_earlier_ones_and_computes_only_what_is_new(start: Machines) -> None:
    (node,) = start.nodes(("decode", {"model": LLAMA, "num_blocks": 256, "block_size": 16}))
    gateway = start.gateway([], [node], model=LLAMA)
    turns = await play(gateway.address, SCRIPT, at_once=1)
    assert [(turn.number, turn.prompt, turn.earlier) for turn in turns] == [
        (number, 100 + 20 * number + 8 * (number - 1), (100 + 28 * (number - 1)) if number > 1 else 0)
        for number in (1, 2, 3)
        for _ in range(SCRIPT.sessions)
    ]
    # The last token of an answer has no KV, and only whole blocks are kept.
    assert [turn.reused for turn in turns] == [(turn.earlier - 1) // 16 * 16 if turn.earlier else 0 for turn in turns]
