"""One row's bits, on a CPU in batch-invariant mode: a token's hidden state in float32 has the same bits as a decode and
in any chunk of a prompt, for every family whose attention computes rows in order."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.invariance import Invariant, Request
from tests.unit.models.tiny import TINY, save_tiny

NUM_TOKENS = 29


def hidden_states(model: Invariant, tokens: list[int], chunk: int) -> Tensor:
    """[T, D], of a sequence that is computed in chunks of this size."""
    steps = model.run(Request(tokens, len(tokens), chunk), {})
    sizes = [min(chunk, len(tokens) - start) for start in range(0, len(tokens), chunk)]
    return torch.cat([step[: -model.vocab_size].view(rows, -1) for step, rows in zip(steps, sizes, strict=True)])


@pytest.mark.parametrize("name", list(TINY))
def test_a_token_has_the_same_bits_as_a_decode_and_in_any_chunk(name: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cpu", dtype="float32")
    tokens = torch.randint(3, model.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    decoded = hidden_states(model, tokens, 1)
    for chunk in (NUM_TOKENS, 16, 5):
        assert torch.equal(hidden_states(model, tokens, chunk), decoded), chunk
