"""Batch-invariant mode where each rank has requests of its own: tokens and logprobs of a request in float32 are the
same to the last bit alone, next to others on its rank and on other ranks, in any chunks, and in buffers of graphs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.core.types import TokenOutput
from tests.ranks import run_ranks
from tests.unit.engine.owners import Outcome, Request, Scene, compute_as_owner
from tests.unit.models.tiny import save_tiny

RANKS = 4
MODELS = ("deepseek-v3", "glm4-moe-lite")
LENGTHS = (12, 40, 3, 70, 25, 33)


def requests() -> list[Request]:
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 0.9, "ignore_eos": True, "logprobs": 0}
    return [
        (tuple((number * 31 + place * place * 7 + place) % 60 for place in range(length)), {**how, "seed": number})
        for number, length in enumerate(LENGTHS)
    ]


def scenes_of(model: Path) -> dict[str, Scene]:
    """All requests at once in several ways, and the first ones alone."""
    asked = requests()

    def scene(requests: Sequence[Request], tokens: int = 256, **more: Any) -> Scene:
        return Scene(model, requests, batch_tokens=tokens, batch_invariant=True, **more)

    together = {"whole": scene(asked), "chunks": scene(asked, 24), "graphs": scene(asked, 24, graphs=True)}
    alone = {f"alone {number}": scene(asked[number : number + 1]) for number in range(3)}
    return together | alone | {"alone in graphs": scene(asked[:1], graphs=True)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Outcome]]]:
    """By model, rank and scene."""
    root = tmp_path_factory.mktemp("models")
    found = {}
    for name in MODELS:
        save_tiny(name, root / name)
        ranks = tmp_path_factory.mktemp("ranks")
        found[name] = run_ranks(compute_as_owner, RANKS, ranks, scenes_of(root / name))
    return found


def output(outcome: Outcome, number: int = 0) -> list[TokenOutput]:
    return outcome.outputs[f"0.{number}"]


@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_same_bits_alone_and_next_to_others(
    name: str, outcomes: dict[str, list[dict[str, Outcome]]]
) -> None:
    for rank in outcomes[name]:
        for scene in ("whole", "chunks", "graphs"):
            for number in range(3):
                assert output(rank[scene], number) == output(rank[f"alone {number}"])
        assert output(rank["alone in graphs"]) == output(rank["alone 0"])
    first = outcomes[name][0]
    assert len(output(first["whole"])) == 8
    assert len({owners[-1] for owners in first["whole"].owners.values()}) == RANKS, "each rank has requests"
    assert first["graphs"].launches["prompt_graph"] > 0
