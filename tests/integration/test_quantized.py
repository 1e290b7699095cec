"""Quantized checkpoints on real nodes with unequal numbers of ranks: tokens are those of the dequantized weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.rpc.channels import connect
from tests.conformance.families.models import MAX_TOKENS, as_model, expected_of
from tests.conformance.families.nodes import handed_over
from tests.integration.cluster import Machines, nothing_held, until_status
from tests.unit.models.fp8_checkpoints import Pair, by_block, save_fp8
from tests.unit.models.packed_checkpoints import gptq_config, int8_config, save_gpt_oss, save_packed

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
# By name: (the checkpoint, ranks of the prefill node, ranks of the decode node).
CHECKPOINTS: dict[str, tuple[Callable[[Path], Pair], int, int]] = {
    "gptq with reordered inputs": (
        partial(save_packed, "Llama", quantization=gptq_config(desc_act=True)),
        1,
        2,
    ),
    "int8": (partial(save_packed, "Llama", quantization=int8_config(static=False)), 2, 1),
    "mxfp4": (save_gpt_oss, 1, 2),
    "fp8 by block": (
        partial(
            save_fp8,
            "Llama",
            quantizer=by_block,
            quantization=_FP8,
            scale_name="weight_scale_inv",
            fields={"head_dim": 128},
        ),
        2,
        1,
    ),
}


def loaded(plain: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", CHECKPOINTS)
async def test_a_pair_with_unequal_ranks_has_the_tokens_of_the_dequantized_weights(
    name: str, start: Machines, tmp_path: Path
) -> None:
    save, senders, receivers = CHECKPOINTS[name]
    made = save(tmp_path)
    prompts = expected_of(as_model(made.quantized, loaded(made.plain)))
    common = {"model": made.quantized, "dtype": "float32", "num_blocks": 64, "max_batch_tokens": 16}
    prefill, decode = start.nodes(
        ("prefill", {**common, "tensor_parallel_size": senders}),
        ("decode", {**common, "tensor_parallel_size": receivers}),
    )
    async with connect(prefill.address) as sends, connect(decode.address) as receives:
        for prompt, expected in zip(prompts.prompts, prompts.expected, strict=True):
            answer = await handed_over(sends, receives, prompt, MAX_TOKENS)
            assert answer.tokens == expected.tokens
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=2e-3)
    last = await until_status(decode, nothing_held)
    assert last.segments_refused == 0
