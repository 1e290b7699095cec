"""Every tile of every prompt of a step is found once, and tokens of no request get zeros."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from baton.models.kernels.recurrent.prompt_tiles import find_tile, most_tiles
from tests.device import DEVICE
from tests.unit.models.recurrent_steps import state_rows
from tests.unit.models.test_continued_states import RULES

TILE = 16


@triton.jit  # type: ignore[untyped-decorator]
def _find(out_ptr, starts_ptr, context_ptr, num_prompts, TILE: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0)
    prompt, place = find_tile(index, starts_ptr, context_ptr, num_prompts, TILE=TILE, ALIGN=ALIGN)
    tl.store(out_ptr + 2 * index, prompt)
    tl.store(out_ptr + 2 * index + 1, place)


@pytest.mark.parametrize("align", [TILE, 1])
@pytest.mark.parametrize("num_prompts", [1, 5, 150])
def test_every_tile_of_a_prompt_is_found_once(num_prompts: int, align: int) -> None:
    """Whatever tokens are before the prompts, and with prompts of padding after them."""
    lengths = [1 + 37 * index % 50 for index in range(num_prompts)]
    contexts = [29 * index % 40 for index in range(num_prompts)]
    rows = state_rows(range(num_prompts), lengths, contexts, decodes=0, device=DEVICE)
    starts_P1, prompts = rows.prompt_starts_P1 + 3, len(rows.prompt_slots_P)
    count = most_tiles(rows, sum(lengths), TILE)
    out = torch.empty(count, 2, dtype=torch.int32, device=DEVICE)
    _find[(count,)](out, starts_P1, rows.prompt_context_P, prompts, TILE=TILE, ALIGN=align)
    found = [(prompt, place) for prompt, place in out.tolist() if prompt < prompts]
    expected = [
        (prompt, place)
        for prompt, (length, context) in enumerate(zip(lengths, contexts, strict=True))
        for place in range(-(-(context % align + length) // TILE))
    ]
    assert found == expected
    after = [place for prompt, place in out.tolist() if prompt == prompts]
    assert after == list(range(count - len(expected)))


@pytest.fixture
def _nothing_is_zero_by_chance() -> Iterator[None]:
    """New memory has NaN in it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_nothing_is_zero_by_chance")
@pytest.mark.parametrize("rule", RULES)
def test_tokens_of_no_request_get_zeros(rule: str) -> None:
    """One between a decode and a prompt, and two after the prompt; rows of padding lie on the prompt's tokens."""
    compute, before = RULES[rule]("triton")
    rows = state_rows([4, 3], [1, 3], [2, 0], device=DEVICE)
    starts_P1 = rows.prompt_starts_P1 + 1
    out = compute(list(range(7)), before.clone(), replace(rows, prompt_starts_P1=starts_P1))
    assert not out[[1, 5, 6]].any()
    decode = compute([0], before.clone(), state_rows([4], [1], [2], device=DEVICE))
    prompt = compute([2, 3, 4], before.clone(), state_rows([3], [3], [0], device=DEVICE))
    assert torch.equal(out[[0, 2, 3, 4]], torch.cat([decode, prompt]))


@pytest.mark.parametrize("rule", RULES)
def test_many_prompts_have_the_bits_of_prompts_alone(rule: str) -> None:
    """More than there are programs for."""
    compute, before = RULES[rule]("triton")
    contexts, together = [0, 3, 64, 0, 70, 1, 5], before.clone()
    out = compute(list(range(7)), together, state_rows(range(7), [1] * 7, contexts, decodes=0, device=DEVICE))
    for index, context in enumerate(contexts):
        alone = before.clone()
        own = compute([index], alone, state_rows([index], [1], [context], decodes=0, device=DEVICE))
        assert torch.equal(out[index], own[0]), index
        assert torch.equal(together[index], alone[index]), index
