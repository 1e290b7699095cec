"""The plan of redundant experts: every expert has a place, ranks have equal room, and no rank gets busier by it."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import ConfigError
from baton.core.expert_load import ExpertLoad, LayerLoad, imbalance, read_expert_load
from baton.models.config.expert_places import LayerPlaces, place_experts, place_layer


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Tokens of each expert, ranks, copies."""
    ranks = draw(st.integers(1, 6))
    loads = draw(st.lists(st.integers(0, 1000), min_size=ranks, max_size=24))
    return loads, ranks, draw(st.integers(0, len(loads) * (ranks - 1)))


def in_order(loads: Sequence[int], ranks: int) -> list[int]:
    """Tokens of each rank that has consecutive experts, without copies."""
    bounds = [len(loads) * rank // ranks for rank in range(ranks + 1)]
    return [sum(loads[start:stop]) for start, stop in pairwise(bounds)]


@given(layers())
def test_each_expert_has_a_place_and_the_ranks_have_equal_room(layer: tuple[list[int], int, int]) -> None:
    loads, ranks, redundant = layer
    places = place_layer(loads, ranks=ranks, redundant=redundant)
    rooms = [len(own) for own in places.ranks]
    assert sum(rooms) == places.num_places == len(loads) + redundant
    assert max(rooms) - min(rooms) <= ((len(loads) + redundant) % ranks > 0)
    assert all(len(set(own)) == len(own) for own in places.ranks), "a second copy on a rank is of no use"
    expert_of = [expert for own in places.ranks for expert in own]
    for expert, turns in enumerate(places.turns):
        assert turns
        assert len(set(turns)) == len(turns)
        assert all(expert_of[place] == expert for place in turns)


@given(layers())
def test_no_rank_is_busier_than_the_busiest_one_without_copies(layer: tuple[list[int], int, int]) -> None:
    loads, ranks, redundant = layer
    busiest = max(place_layer(loads, ranks=ranks, redundant=redundant).expected(loads))
    assert busiest <= max(in_order(loads, ranks)) * (1 + 1e-6)
    assert busiest >= sum(loads) / ranks * (1 - 1e-6)


@given(layers())
def test_equal_loads_give_equal_plans(layer: tuple[list[int], int, int]) -> None:
    loads, ranks, redundant = layer
    again = place_layer(tuple(loads), ranks=ranks, redundant=redundant)
    assert place_layer(loads, ranks=ranks, redundant=redundant) == again


@given(layers(), st.data())
def test_tokens_of_places_are_those_of_experts_and_of_ranks(
    layer: tuple[list[int], int, int], data: st.DataObject
) -> None:
    loads, ranks, redundant = layer
    places = place_layer(loads, ranks=ranks, redundant=redundant)
    used = {place for turns in places.turns for place in turns}
    tokens = [data.draw(st.integers(0, 9)) if place in used else 0 for place in range(places.num_places)]
    assert sum(places.of_experts(tokens)) == sum(places.of_ranks(tokens)) == sum(tokens)
    for rank, own in enumerate(places.ranks):
        first = places.first(rank)
        assert places.of_ranks(tokens)[rank] == sum(tokens[first : first + len(own)])


def test_the_busiest_expert_is_on_several_ranks() -> None:
    loads = [80, 10, 10, 10, 5, 5]
    places = place_layer(loads, ranks=2, redundant=2)
    assert [len(turns) for turns in places.turns].count(2) == 2
    assert len(places.turns[0]) == 2
    assert imbalance([round(each) for each in places.expected(loads)]) == 1.0
    assert imbalance(in_order(loads, 2)) == pytest.approx(100 / 60)


def test_a_copy_that_would_make_its_rank_the_busiest_one_takes_no_tokens() -> None:
    # Three places on two ranks: whichever expert is doubled, its half joins the other expert.
    places = place_layer([10, 9], ranks=2, redundant=1)
    assert max(places.expected([10, 9])) == 10
    assert places.num_places == 3


def test_without_load_and_copies_experts_are_in_order() -> None:
    plan = place_experts((False, True), 5, ranks=2)
    assert plan.layers == (None, LayerPlaces(((0, 1), (2, 3, 4)), tuple((expert,) for expert in range(5))))


def test_without_load_all_experts_count_alike() -> None:
    plan = place_experts((True,), 4, ranks=2, redundant=4)
    assert plan.layer(0).ranks == ((0, 1, 2, 3), (0, 1, 2, 3))
    # The first turns, which a step of one token takes, are on both ranks.
    assert {turns[0] // 4 for turns in plan.layer(0).turns} == {0, 1}


def test_each_layer_has_its_own_plan() -> None:
    load = saved({0: (100, 3, 2, 1), 2: (1, 2, 3, 100)})
    plan = place_experts((True, False, True), 4, ranks=2, redundant=2, load=load)
    assert [len(turns) for turns in plan.layer(0).turns] == [2, 2, 1, 1]
    assert [len(turns) for turns in plan.layer(2).turns] == [1, 1, 2, 2]
    assert [index for index, _ in plan.mixtures] == [0, 2]


def test_more_copies_than_ranks_can_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 copies are possible") as refused:
        place_experts((True,), 4, ranks=3, redundant=9)
    assert refused.value.allowed == ("0 to 8",)
    with pytest.raises(ConfigError, match="0 copies are possible"):
        place_experts((True,), 4, ranks=1, redundant=1)


@pytest.mark.parametrize("layers", [{0: (1, 2, 3)}, {1: (1, 2)}, {0: (1, 2), 1: (1, 2)}, {}])
def test_a_load_of_another_model_is_refused(layers: dict[int, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="the model has 1 layers with 2"):
        place_experts((True, False), 2, ranks=2, load=saved(layers))


# ---- the file


def saved(layers: dict[int, tuple[int, ...]]) -> ExpertLoad:
    return ExpertLoad(layers=tuple(LayerLoad(layer=layer, tokens=tokens) for layer, tokens in layers.items()))


def test_a_saved_load_is_read_as_it_was(tmp_path: Path) -> None:
    load = ExpertLoad(
        model="mixture", redundant_experts=1, layers=(LayerLoad(layer=3, tokens=(4, 0), rank_tokens=(1, 3)),)
    )
    (tmp_path / "load.json").write_text(load.model_dump_json())
    assert read_expert_load(tmp_path / "load.json") == load


@pytest.mark.parametrize(
    "text", ["", "[]", '{"layers": 1}', json.dumps({"layers": [{"layer": 0, "tokens": [-1]}]}), "{}"]
)
def test_a_file_that_is_no_load_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "load.json").write_text(text)
    with pytest.raises(ConfigError, match="is not an expert load"):
        read_expert_load(tmp_path / "load.json")
    with pytest.raises(ConfigError, match="No such file"):
        read_expert_load(tmp_path / "none.json")


def test_the_difference_of_two_loads_is_what_came_between() -> None:
    before = ExpertLoad(layers=(LayerLoad(layer=0, tokens=(1, 2), rank_tokens=(2, 1)),))
    now = ExpertLoad(layers=(LayerLoad(layer=0, tokens=(4, 2), rank_tokens=(3, 3)),))
    assert now.since(before) == ExpertLoad(layers=(LayerLoad(layer=0, tokens=(3, 0), rank_tokens=(1, 2)),))
    assert now.since(before).rank_tokens == (1, 2)
    assert now.since(now).layers[0].imbalance == 1.0, "without tokens"
