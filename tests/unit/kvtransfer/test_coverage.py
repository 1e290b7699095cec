"""Claims on cells agree with a plain set of cells."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.coverage import Coverage

boxes = st.tuples(
    st.integers(0, 2), st.integers(1, 3), st.integers(0, 9), st.integers(1, 4), st.integers(0, 2), st.integers(1, 2)
)


@settings(deadline=None)
@given(st.lists(boxes, max_size=30))
def test_a_box_is_claimed_exactly_when_none_of_its_cells_was(
    claims: list[tuple[int, int, int, int, int, int]],
) -> None:
    coverage, cells = Coverage(5), set[tuple[int, int, int]]()
    for layer, layers, token, tokens, head, heads in claims:
        box = {
            (each_layer, each_token, each_head)
            for each_layer in range(layer, layer + layers)
            for each_token in range(token, token + tokens)
            for each_head in range(head, head + heads)
        }
        claimed = coverage.claim(range(layer, layer + layers), token, token + tokens, range(head, head + heads))
        assert claimed == (not box & cells)
        if claimed:
            cells |= box
