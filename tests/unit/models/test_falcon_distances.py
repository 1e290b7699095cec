"""Falcon's ALiBi over long prompts: transformers rounds slope times position to bfloat16, and Baton does not. That
rounding is the only difference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.falcon import modeling_falcon

from baton.models.families.reader import read_config
from baton.models.loading.loader import load_model
from tests.unit.models.paged import BLOCK_SIZE, PagedDriver, backend_for
from tests.unit.models.tiny import VOCAB_SIZE, save_tiny

ROUNDED = modeling_falcon.build_alibi_tensor
# Slopes are powers of two with up to 8 heads: their products with positions below 257 fit in 8 bits.
EXACT_TOKENS, TOKENS = 257, 400
NUM_BLOCKS = TOKENS // BLOCK_SIZE


def unrounded(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """As transformers' function, with the product in float32."""
    first_T = torch.ones_like(attention_mask[:, :2])
    slopes_H = ROUNDED(first_T, num_heads, torch.float32)[:, 0, 1]  # at position 1
    positions_T = (attention_mask.cumsum(-1) - 1).float()
    distances_H1T: Tensor = slopes_H[:, None, None] * positions_T[None]
    return distances_H1T.to(dtype)


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "four heads": ("falcon-rw", {}),
    "six heads": ("falcon-rw-untied-six-heads", {}),
    "eight heads": ("falcon-rw", {"num_attention_heads": 8}),
    "one norm": ("falcon-new-one-norm-alibi", {}),
    "sixteen heads": ("falcon-rw", {"num_attention_heads": 16, "hidden_size": 64}),
}


@pytest.fixture(scope="module", params=list(MODELS))
def logits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Tensor]]:
    """Ours, and transformers' with a function for the distances."""
    directory = tmp_path_factory.mktemp("falcon")
    name, changed = MODELS[request.param]
    reference, config = save_tiny(name, directory, changed=changed), read_config(directory)
    backend = backend_for(config, num_blocks=NUM_BLOCKS)
    model = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
    tokens = torch.randint(VOCAB_SIZE, (TOKENS,), generator=torch.Generator().manual_seed(0))

    def run(distances: Callable[..., Tensor]) -> list[Tensor]:
        ours = PagedDriver(model, backend, num_blocks=NUM_BLOCKS).step({"r": tokens.tolist()})["r"]
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(modeling_falcon, "build_alibi_tensor", distances)
            return [ours, reference(tokens[None]).logits[0]]

    return run


def test_long_prompts_equal_transformers_but_for_its_rounding(logits: Callable[..., list[Tensor]]) -> None:
    ours, exact = logits(unrounded)
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("logits", ["four heads", "eight heads"], indirect=True)
def test_powers_of_two_are_not_rounded_up_to_position_256(logits: Callable[..., list[Tensor]]) -> None:
    ours, rounded = logits(ROUNDED)
    torch.testing.assert_close(ours[:EXACT_TOKENS], rounded[:EXACT_TOKENS], rtol=1e-4, atol=1e-4)
    assert float((ours - rounded)[EXACT_TOKENS:].abs().max()) > 1e-4, "the page about models says that they differ"


@pytest.mark.parametrize("logits", ["sixteen heads"], indirect=True)
def test_other_slopes_are_rounded_from_the_fourth_token_on(logits: Callable[..., list[Tensor]]) -> None:
    ours, rounded = logits(ROUNDED)
    difference_T = (ours - rounded).abs().amax(dim=1)
    assert float(difference_T[:3].max()) < 1e-5 < float(difference_T[3])
    assert 1e-4 < float(difference_T[:16].max()) < float(difference_T.max())
