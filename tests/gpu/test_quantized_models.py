"""Whole models with quantized weights in bfloat16: logits near those of the dequantized weights in float32, for every
scheme, with widths and groups that the kernels for Hopper take. On a CPU the plain products run instead."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from baton.models.families.reader import read_config
from baton.models.kernels.quantized import (
    few_tokens,
    mxfp4_experts,
    packed_experts,
    packed_few,
    packed_gemm,
    packed_tma,
)
from baton.models.layers.causal_lm import CausalLM
from baton.models.loading.loader import load_model
from baton.models.quantization.fp8_linear import Fp8Linear, multiplies_fp8
from baton.models.quantization.int8_linear import Int8Linear
from baton.models.quantization.packed_linear import PackedLinear
from baton.tritonlib.hopper_check import has_hopper_kernels, is_hopper
from tests.device import DEVICE
from tests.unit.models.fp8_checkpoints import VOCAB_SIZE, Pair, Quantizer, by_block, by_channel, by_tensor, save_fp8
from tests.unit.models.packed_checkpoints import (
    AWQ_CONFIG,
    gptq_config,
    int8_config,
    packed_config,
    save_gpt_oss,
    save_packed,
)
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.test_quantization import AUTO_FP8, COMPRESSED_DYNAMIC, DEEPSEEK

GROUP = 128
NUM_BLOCKS = 320
_SHARED = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.044,
}
_LLAMA = _SHARED | {"num_key_value_heads": 2}
# Every expert is chosen, so that rounding cannot choose others.
_DEEPSEEK = _SHARED | {
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
}
_MIXTRAL = _SHARED | {
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,
}
_GPT_OSS = _SHARED | {"intermediate_size": 512, "head_dim": 64, "num_experts_per_tok": 4, "initializer_range": 0.06}

# Kernels for Hopper that a scheme's steps must use.
LINEAR = frozenset({"few rows", "copies"})
EXPERTS = frozenset({"experts"})
TILED_EXPERTS = frozenset({"experts in tiles"})
FEW_TOKENS = frozenset({"few tokens of 8 bits"})


class Bound(NamedTuple):
    """Relative errors of a token's logits, in the Euclidean norm."""

    mean: float
    largest: float


# On a CPU, with weights dequantized to bfloat16 and the inputs of layers rounded to 8 bits as kernels do, the means are
# at most 0.014, 0.037 and 0.12, the largest errors 0.037, 0.066 and 0.25. One layer's scales in reverse order make
# means of 0.12, 0.088 and 0.2 by themselves.
OF_BFLOAT16, OF_INT8, OF_FP8 = Bound(0.02, 0.05), Bound(0.05, 0.1), Bound(0.15, 0.35)


class Scheme(NamedTuple):
    """A pair of checkpoints, the bound on errors, and the kernels for Hopper that its steps must use."""

    save: Callable[[Path], Pair]
    bound: Bound
    hopper: frozenset[str] = frozenset()


def packed(
    family: str,
    fields: Mapping[str, Any],
    quantization: dict[str, Any],
    hopper: frozenset[str] = LINEAR,
    *,
    bound: Bound = OF_BFLOAT16,
) -> Scheme:
    return Scheme(lambda path: save_packed(family, path, quantization, fields=fields), bound, hopper)


def spread(weight_NK: Tensor) -> Tensor:
    """Gives runs of 64 outputs sizes of their own, so that a scale in another's place shows among rounded inputs."""
    runs = -(-weight_NK.shape[0] // 64)
    factors = 2 ** (0.5 * torch.randn(runs, generator=torch.Generator().manual_seed(runs)))
    return weight_NK * factors.repeat_interleave(64)[: weight_NK.shape[0], None]


def fp8(quantizer: Quantizer, quantization: dict[str, Any], scale: str, input_scale: float | None = None) -> Scheme:
    def save(path: Path) -> Pair:
        return save_fp8(
            "Llama",
            path,
            lambda weight_NK: quantizer(spread(weight_NK)),
            quantization,
            scale_name=scale,
            input_scale=input_scale,
            fields=_LLAMA,
        )

    return Scheme(save, OF_FP8, FEW_TOKENS)


AWQ = AWQ_CONFIG | {"group_size": GROUP}
SCHEMES = {
    "gptq": packed("Llama", _LLAMA, gptq_config(group_size=GROUP)),
    "gptq asymmetric reordered": packed("Llama", _LLAMA, gptq_config(group_size=64, sym=False, desc_act=True)),
    "gptq of 8 bits by channel": packed("Llama", _LLAMA, gptq_config(bits=8, group_size=-1), frozenset()),
    "gptq latent attention and experts": packed(
        "DeepseekV3", _DEEPSEEK, gptq_config(group_size=GROUP), LINEAR | EXPERTS
    ),
    "awq": packed("Llama", _LLAMA, AWQ),
    "awq latent attention and experts": packed("DeepseekV3", _DEEPSEEK, AWQ, LINEAR | EXPERTS),
    "w4a16": packed("Llama", _LLAMA, packed_config(group_size=GROUP)),
    "w4a16 asymmetric reordered": packed(
        "Llama", _LLAMA, packed_config(group_size=GROUP, symmetric=False, actorder="group")
    ),
    "w4a16 experts": packed("Mixtral", _MIXTRAL, packed_config(group_size=64), LINEAR | EXPERTS),
    "w8a8": packed("Llama", _LLAMA, int8_config(static=False), FEW_TOKENS, bound=OF_INT8),
    "fp8 blocks": fp8(by_block, DEEPSEEK, "weight_scale_inv"),
    "fp8 channels": fp8(by_channel, COMPRESSED_DYNAMIC, "weight_scale"),
    "fp8 tensors, inputs by a given scale": fp8(by_tensor, AUTO_FP8, "weight_scale", 0.1),
    "mxfp4": Scheme(lambda path: save_gpt_oss(path, fields=_GPT_OSS, scales=(119, 122)), OF_BFLOAT16, TILED_EXPERTS),
}


def logits_of(directory: Path, dtype: str, device: str) -> tuple[CausalLM, Tensor]:
    """Of a prompt with more rows than the kernels take, a decode alone, and a decode next to a prompt of 80 tokens."""
    config = read_config(directory)
    backend = backend_for(config, dtype, device=device, num_blocks=NUM_BLOCKS)
    model = load_model(directory, config, backend=backend, dtype=dtype, device=device)
    driver = PagedDriver(model, backend, dtype, device=device, num_blocks=NUM_BLOCKS)
    generator = torch.Generator().manual_seed(0)
    long, short = (torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist() for count in (1032, 80))
    steps = [{"long": long[:1030]}, {"long": long[1030:1031]}, {"long": long[1031:], "short": short}]
    logits = [logits_TV for step in steps for logits_TV in driver.step(step).values()]
    return model, torch.cat(logits).float().cpu()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kernels for Hopper that were launched since the test began."""
    seen: set[str] = set()
    for kernels in (packed_gemm._HOPPER, packed_experts._HOPPER, mxfp4_experts._HOPPER, few_tokens.HOPPER):
        has_hopper_kernels(torch.device(DEVICE), kernels)  # with an unmeasured Triton, this launches them
    copies, few = packed_tma.multiply, packed_few.multiply
    step_of, tiled = packed_experts.hopper_step, mxfp4_experts.multiply_tiled
    of_8_bits = few_tokens.multiply

    def multiply(*args: Any, **options: Any) -> Tensor:
        seen.add("copies")
        return copies(*args, **options)

    def multiply_few(*args: Any, **options: Any) -> Tensor:
        seen.add("few rows")
        return few(*args, **options)

    def hopper_step(*args: Any) -> int | None:
        step = step_of(*args)
        seen.update(() if step is None else EXPERTS)
        return step

    def multiply_tiled(*args: Any, **options: Any) -> Tensor:
        seen.update(TILED_EXPERTS)
        return tiled(*args, **options)

    def multiply_few_tokens(*args: Any, **options: Any) -> Tensor:
        seen.update(FEW_TOKENS)
        return of_8_bits(*args, **options)

    monkeypatch.setattr(few_tokens, "multiply", multiply_few_tokens)
    monkeypatch.setattr(mxfp4_experts, "multiply_tiled", multiply_tiled)
    monkeypatch.setattr(packed_tma, "multiply", multiply)
    monkeypatch.setattr(packed_few, "multiply", multiply_few)
    monkeypatch.setattr(packed_experts, "hopper_step", hopper_step)
    return seen


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_are_near_those_of_the_dequantized_weights(name: str, tmp_path: Path, launched: set[str]) -> None:
    scheme = SCHEMES[name]
    pair = scheme.save(tmp_path)
    _, expected_TV = logits_of(pair.plain, "float32", "cpu")
    assert float(expected_TV.std()) > 0.1
    model, logits_TV = logits_of(pair.quantized, "bfloat16", DEVICE)
    error_T = (logits_TV - expected_TV).norm(dim=1) / expected_TV.norm(dim=1)
    error = Bound(float(error_T.mean()), float(error_T.max()))
    print(f"\n{name}: {error}")
    assert error.mean < scheme.bound.mean
    assert error.largest < scheme.bound.largest
    assert_runs_kernels(model)
    if is_hopper(torch.device(DEVICE)):
        assert launched == scheme.hopper


def assert_runs_kernels(model: CausalLM) -> None:
    """Fails if a quantized layer is computed otherwise than by the kernels of this GPU."""
    for path, layer in model.named_modules():
        if isinstance(layer, PackedLinear) and layer.weights:
            assert bool(layer._products) == (DEVICE == "cuda"), path
        elif isinstance(layer, Int8Linear) and layer.scale_N is not None:
            assert (layer._arrived is not None) == (DEVICE == "cuda"), path
        elif isinstance(layer, Fp8Linear) and layer.scale_RC is not None:
            assert (layer._product is not None) == multiplies_fp8(torch.device(DEVICE)), path
