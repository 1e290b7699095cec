"""What tests of MTP layers and of EAGLE-3 heads share: a pair whose nodes draft with a layer that drafts tokens, a node
that drafts alone, and one that does not draft."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from baton.cli.processes import Process
from baton.core.sampling import SamplingParams
from baton.core.types import Path as RequestPath
from tests.integration.cluster import LLAMA, Flags, machines, nothing_held, until_status
from tests.integration.generation import generate
from tests.integration.reference import Reference
from tests.integration.test_layer_groups import fix_layers_per_group
from tests.unit.models.tiny_eagle import save_with_good_head
from tests.unit.models.tiny_mtp import save_with_good_layer

VOCABULARY = 4096
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.7, seed=5)
PROMPTS = [[3 + (seed + 7) * token * token % 3001 for token in range(40 + 9 * seed)] for seed in range(5)]


class SpeculatingPair(NamedTuple):
    """Gateways of a pair that drafts, of a decode node that drafts alone, and of one that does not; and the pair's
    decode node."""

    pair: Process
    alone: Process
    plain: Process
    decode: Process


def add_tokenizer(model: Path) -> None:
    """Gives a model of `VOCABULARY` tokens the tokenizer of a demo model."""
    assert json.loads((LLAMA / "config.json").read_text())["vocab_size"] == VOCABULARY
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, model)


def speculating_flags(kind: str, directory: Path) -> Flags:
    """Saves a model that drafts to the directory. Returns the flags of a node that always drafts with it.

    Args:
        kind: "mtp" or "eagle".
    """
    model, head = directory / "model", directory / "head"
    flags: Flags = {"model": model, "num_blocks": 256, "max_batch_tokens": 32, "speculation": "always"}
    if kind == "mtp":
        save_with_good_layer(model, changed={"vocab_size": VOCABULARY})
    else:
        save_with_good_head(model, head, vocab_size=VOCABULARY)
        flags |= {"draft_head": head}
    add_tokenizer(model)
    return flags


def speculating_gateways(model: Path, plain: Flags, speculating: Flags, *, layout: str) -> Iterator[SpeculatingPair]:
    """Starts the nodes, and their gateways.

    Args:
        plain, speculating: flags of nodes without and with drafts.
        layout: of the pair's decode node.
    """
    with machines() as start:
        prefill, decode, single, other = start.nodes(
            ("prefill", speculating),
            ("decode", {**speculating, "block_size": 32, "kv_cache_layout": layout}),
            ("decode", speculating),
            ("decode", {**plain, "speculation": "off"}),
            prepare=fix_layers_per_group,
        )
        pair = start.gateway([prefill], [decode], model=model, local_policy="strict")
        alone = start.gateway([], [single], model=model, local_policy="local")
        yield SpeculatingPair(pair, alone, start.gateway([], [other], model=model, local_policy="local"), decode)


async def check_tokens(gateways: SpeculatingPair, model: Path, params: SamplingParams) -> None:
    """Tokens are those without drafts, and greedy ones those of transformers."""
    expected = await asyncio.gather(*(generate(gateways.plain, prompt, params) for prompt in PROMPTS))
    if params is GREEDY:
        reference = Reference(model)
        for prompt, each in zip(PROMPTS, expected, strict=True):
            assert each.token_ids == reference.greedy(prompt, GREEDY.resolved().max_tokens).token_ids
    for gateway in (gateways.pair, gateways.alone):
        results = await asyncio.gather(*(generate(gateway, prompt, params) for prompt in PROMPTS))
        assert [each.token_ids for each in results] == [each.token_ids for each in expected]
        assert all(each.proof.drafted_tokens for each in results)
    await until_status(gateways.decode, nothing_held)


async def check_first_step(pair: Process) -> None:
    """The first step of the decode node drafts."""
    for prompt in PROMPTS:
        result = await generate(pair, prompt, replace(GREEDY, max_tokens=3), cache_salt="first")
        assert result.proof.path is RequestPath.REMOTE
        assert result.proof.drafted_tokens == 1, "no more fits, and none would be known without the hand-over"
