"""One row's bits, on a CPU in batch-invariant mode: a token's hidden state in float32 has the same bits as a decode and
in any chunk of a prompt, for every family without recurrent states."""

from pathlib import Path

import pytest
import torch

from tests.invariance import Invariant, drawn_tokens, hidden_states
from tests.unit.models.tiny import TINY, save_tiny

NUM_TOKENS = 29
# Their recurrent states are computed in chunks of a fixed size.
_RECURRENT = frozenset(
    ("Bamba", "FalconH1", "GraniteMoeHybrid", "KimiLinear", "Lfm2", "Lfm2Moe", "NemotronH", "Qwen3Next", "Qwen3_5")
) | {"Qwen3_5Moe"}
NAMES = [name for name, (model, _) in TINY.items() if model not in _RECURRENT]


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_as_a_decode_and_in_any_chunk(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cpu", dtype="float32")
    tokens = drawn_tokens(model, NUM_TOKENS)
    decoded = hidden_states(model, tokens, chunk=1)
    for chunk in (NUM_TOKENS, 16, 5):
        assert torch.equal(hidden_states(model, tokens, chunk=chunk), decoded), chunk
