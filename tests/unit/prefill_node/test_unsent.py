"""Every token of every layer is taken once, and not before it is computed."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from baton.kvcache.spec import KVCacheSpec, KVKind
from kvtransfer.segments import SegmentPiece
from prefill_node.call_sends import Unsent

LAYERS = 4
SPEC = KVCacheSpec(KVKind.GQA, LAYERS, num_kv_heads=2, head_dim=4, dtype="float32")
INDEX = KVCacheSpec(KVKind.MLA, LAYERS, num_kv_heads=1, head_dim=2, dtype="float32")
STATE = KVCacheSpec(KVKind.STATE, 3, num_kv_heads=2, head_dim=5, dtype="float32")


def unsent(spec: KVCacheSpec = SPEC) -> Unsent:
    return Unsent(spec, token_start=10, token_stop=100)


def test_a_chunk_is_one_part() -> None:
    sending = unsent()
    sending.computed(50)
    assert sending.take() == [SegmentPiece(range(LAYERS), 10, 50)]
    assert sending.take() == []


def test_first_layers_are_taken_before_the_others_of_their_chunk() -> None:
    sending = unsent()
    sending.computed(50, layer_stop=2)
    assert sending.take() == [SegmentPiece(range(2), 10, 50)]
    sending.computed(50, layer_stop=3)
    assert sending.take() == [SegmentPiece(range(2, 3), 10, 50)]
    sending.computed(50)
    assert sending.take() == [SegmentPiece(range(3, LAYERS), 10, 50)]


def test_the_index_of_the_first_layers_is_taken_with_them() -> None:
    sending = unsent(replace(SPEC, index=INDEX))
    sending.computed(50, layer_stop=2)  # without an indexer
    assert sending.take() == [SegmentPiece(range(2), 10, 50)]
    sending.computed(50, layer_stop=3, index_stop=1)
    assert sending.take() == [SegmentPiece(range(2, 3), 10, 50), SegmentPiece(range(LAYERS, LAYERS + 1), 10, 50)]
    sending.computed(50)
    rest = [SegmentPiece(range(3, LAYERS), 10, 50), SegmentPiece(range(LAYERS + 1, 2 * LAYERS), 10, 50)]
    assert sending.take() == rest


def test_a_state_is_taken_once_and_last() -> None:
    sending = unsent(replace(SPEC, state=STATE))
    sending.computed(50)
    assert sending.take() == [SegmentPiece(range(LAYERS), 10, 50)]
    sending.computed(100, layer_stop=LAYERS)
    assert sending.take() == [SegmentPiece(range(LAYERS), 50, 100)]
    sending.computed(100)
    assert sending.take() == [SegmentPiece(range(LAYERS, LAYERS + 3), 99, 100)]
    sending.computed(100)
    assert sending.take() == []


def test_a_state_with_a_last_chunk_of_one_token_joins_its_piece() -> None:
    sending = unsent(replace(SPEC, state=STATE))
    sending.computed(99)
    sending.take()
    sending.computed(100)
    assert sending.take() == [SegmentPiece(range(LAYERS + 3), 99, 100)]


def test_parts_computed_between_two_takes_are_taken_together() -> None:
    sending = unsent()
    sending.computed(50, layer_stop=2)
    sending.computed(50)
    sending.computed(80, layer_stop=1)
    assert sending.take() == [SegmentPiece(range(1), 10, 80), SegmentPiece(range(1, LAYERS), 10, 50)]


def test_tokens_outside_of_the_wanted_range_are_not_taken() -> None:
    sending = unsent()
    sending.computed(10)
    assert sending.take() == []
    sending.computed(200)
    assert sending.take() == [SegmentPiece(range(LAYERS), 10, 100)]


def test_a_prompt_that_is_computed_again_is_taken_once() -> None:
    sending = unsent()
    sending.computed(50)
    assert sending.take() == [SegmentPiece(range(LAYERS), 10, 50)]
    sending.computed(30)
    assert sending.take() == []
    sending.computed(60)
    assert sending.take() == [SegmentPiece(range(LAYERS), 50, 60)]


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(1, LAYERS), max_size=3), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_every_cell_is_taken_once_and_only_when_it_is_computed(chunks: list[tuple[int, list[int], bool]]) -> None:
    sending = unsent()
    taken: set[tuple[int, int]] = set()
    computed: set[tuple[int, int]] = set()

    def take() -> None:
        for part in sending.take():
            cells = {(layer, token) for layer in part.layers for token in range(part.token_start, part.token_stop)}
            assert cells <= computed - taken
            taken.update(cells)

    start = 0
    for length, groups, takes_between in chunks:
        stop = min(start + length, 100)
        for layer_stop in [*sorted(groups), LAYERS]:
            sending.computed(stop, layer_stop=layer_stop)
            computed |= {(layer, token) for layer in range(layer_stop) for token in range(10, stop)}
            if takes_between:
                take()
        start = stop
    take()
    assert taken == computed
