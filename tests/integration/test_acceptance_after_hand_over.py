"""The drafts of a decode node are as often right as those of one process, from the first step on, whether they come
from an MTP layer or from an EAGLE-3 head.

Each pair has nodes of its own with blocks of the same size, and requests come one after another with a salt each, so
that nothing else decides what is drafted. The first step of the decode node has two drafts from the prefill node, that
of one process up to four, so outputs are long enough for this to be less than 1 %.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.core.types import Path as RequestPath
from tests.integration.cluster import Machines
from tests.integration.generation import Result, generate
from tests.integration.speculating_pair import DRAWN, GREEDY, PROMPTS, speculating_flags


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "eagle"])
async def test_as_many_drafts_are_accepted_after_a_hand_over_as_in_one_process(
    start: Machines, kind: str, tmp_path: Path
) -> None:
    flags = speculating_flags(kind, tmp_path)
    prefill, decode, single = start.nodes(("prefill", flags), ("decode", flags), ("decode", flags))
    model = flags["model"]
    pair = start.gateway([prefill], [decode], model=model, local_policy="strict")
    alone = start.gateway([], [single], model=model, local_policy="local")
    for params in (replace(each, max_tokens=160) for each in (GREEDY, DRAWN)):
        results: dict[str, list[Result]] = {}
        for name, gateway in (("pair", pair), ("alone", alone)):
            results[name] = [
                await generate(gateway, prompt, params, cache_salt=f"{params.temperature} {number}")
                for number, prompt in enumerate(PROMPTS)
            ]
        assert all(each.proof.path is RequestPath.REMOTE for each in results["pair"])
        assert [each.token_ids for each in results["pair"]] == [each.token_ids for each in results["alone"]]
        assert acceptance(results["pair"]) == pytest.approx(acceptance(results["alone"]), rel=0.01)


def acceptance(results: list[Result]) -> float:
    return sum(each.proof.accepted_tokens for each in results) / sum(each.proof.drafted_tokens for each in results)
