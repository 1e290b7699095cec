"""Prompts in order have the bits of decodes: outputs, last states, and states within, in any cut and next to others.

Legend: S slot, and others as in `tests.unit.models.test_continued_states`.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from baton.models.kernels.recurrent.state_rows import StateRows
from tests.device import DEVICE
from tests.unit.models.recurrent_steps import state_rows
from tests.unit.models.test_continued_states import RULES, TOKENS, Rule

SLOT, OTHER, EARLY, LATE = 2, 5, 7, 0
by_rule = pytest.mark.parametrize("rule", RULES)
by_twin = pytest.mark.parametrize("twin", ["torch", "triton"])
by_context = pytest.mark.parametrize("context", [0, 61])


def prompts(*args: list[int], snapshots: dict[int, list[tuple[int, int]]] | None = None) -> StateRows:
    """Of slots, new tokens and earlier tokens, as prompts in order even if they have one token."""
    return replace(state_rows(*args, decodes=0, snapshots=snapshots or {}, device=DEVICE), in_order=True)


def decoded(compute: Rule, states: Tensor, context: int) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all tokens one by one, and the state after each."""
    out, after = [], []
    for token in range(TOKENS):
        out.append(compute([token], states, state_rows([SLOT], [1], [context + token], device=DEVICE)))
        after.append(states[SLOT].clone())
    return torch.cat(out), after


@by_context
@by_twin
@by_rule
def test_a_prompt_has_the_bits_of_decodes_and_leaves_their_states_anywhere(rule: str, twin: str, context: int) -> None:
    compute, before = RULES[rule](twin)
    expected, after = decoded(compute, before.clone(), context)
    states = before.clone()
    rows = prompts([SLOT], [TOKENS], [context], snapshots={SLOT: [(1, EARLY), (5, LATE)]})
    assert torch.equal(compute(list(range(TOKENS)), states, rows), expected)
    for slot, tokens in ((SLOT, TOKENS), (EARLY, 1), (LATE, 5)):
        assert torch.equal(states[slot], after[tokens - 1]), tokens
    untouched = [slot for slot in range(len(states)) if slot not in (SLOT, EARLY, LATE)]
    assert torch.equal(states[untouched], before[untouched])


@by_context
@by_twin
@by_rule
def test_a_prompt_may_be_cut_anywhere_next_to_others(rule: str, twin: str, context: int) -> None:
    """Next to a decode and a prompt with the same tokens; a cut may leave one token, as a prompt or as a decode."""
    compute, before = RULES[rule](twin)
    expected, after = decoded(compute, before.clone(), context)
    states, out = before.clone(), []
    for index, (start, stop) in enumerate(pairwise([0, 1, 4, 6, TOKENS])):
        states[OTHER] = before[OTHER]
        places = [6, *range(start, stop), 3, 4]
        rows = state_rows(
            [EARLY, SLOT, OTHER], [1, stop - start, 2], [9, context + start, 40], decodes=1, device=DEVICE
        )
        computed = compute(places, states, replace(rows, in_order=True))[1 : 1 + stop - start]
        out.append(computed)
        assert torch.equal(states[SLOT], after[stop - 1]), index
    assert torch.equal(torch.cat(out), expected)
    as_decode = before.clone()
    compute(list(range(TOKENS - 1)), as_decode, prompts([SLOT], [TOKENS - 1], [context]))
    last = compute([TOKENS - 1], as_decode, state_rows([SLOT], [1], [context + TOKENS - 1], device=DEVICE))
    assert torch.equal(last, expected[-1:])


@by_twin
@by_rule
def test_padding_writes_nothing(rule: str, twin: str) -> None:
    compute, before = RULES[rule](twin)
    states = before.clone()
    compute(list(range(TOKENS)), states, prompts([-1, -1], [3, 4], [0, 6]))
    assert torch.equal(states, before)
