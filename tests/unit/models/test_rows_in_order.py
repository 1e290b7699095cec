"""One row's bits, on a CPU in batch-invariant mode: a token's hidden state in float32 has the same bits as a decode and
in any chunk of a prompt, for every family."""

from pathlib import Path

import pytest
import torch

from tests.invariance import Invariant, drawn_tokens, hidden_states
from tests.unit.models.tiny import TINY, save_tiny

NUM_TOKENS = 29


@pytest.mark.parametrize("name", TINY)
def test_a_token_has_the_same_bits_as_a_decode_and_in_any_chunk(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cpu", dtype="float32")
    tokens = drawn_tokens(model, NUM_TOKENS)
    decoded = hidden_states(model, tokens, chunk=1)
    for chunk in (NUM_TOKENS, 16, 5):
        assert torch.equal(hidden_states(model, tokens, chunk=chunk), decoded), chunk
