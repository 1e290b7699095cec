"""Norms and activations that quantize for the next layer, compiled: the bits of separate kernels at the shapes of
served models, in captured steps, and in whole tiny models in fp8 and int8."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.models.families.dense.gemma import GemmaRMSNorm
from baton.models.families.reader import read_config
from baton.models.kernels import activation, norms
from baton.models.kernels.quantized.rows import QuantizedRows, RowFormat, quantize
from baton.models.layers.norms import RMSNorm
from baton.models.loading.loader import load_model
from baton.models.quantization import fp8_linear, int8_linear
from baton.models.quantization.fp8_linear import Fp8Linear, multiplies_fp8
from baton.models.quantization.int8_linear import Int8Linear
from tests.unit.models.packed_checkpoints import int8_config
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.test_quantization import AUTO_FP8, COMPRESSED_DYNAMIC, DEEPSEEK
from tests.unit.models.test_quantized_rows import KINDS, assert_same, by_format, mlp_of, norm_of, rows

pytestmark = pytest.mark.gpu

needs_fp8 = pytest.mark.skipif(
    not torch.cuda.is_available() or not multiplies_fp8(torch.device("cuda")), reason="the GPU does not multiply fp8"
)
# Around the most rows whose launches overlap, and many.
TOKENS = (1, 3, 32, 33, 1000)
NORMS = [(size, torch.bfloat16) for size in (576, 4096, 5120, 8192)] + [(4096, torch.float16), (4096, torch.float32)]
LAYERS = 2
STEPS = 3
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GEMMA = _MODEL | {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 64,
    "query_pre_attn_scalar": 128,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GLM = _MODEL | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "partial_rotary_factor": 0.5}
_DEEPSEEK = _MODEL | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": LAYERS,
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
}
# A config, and the number of a layer's linear layers.
MODELS = {"llama": (_MODEL, 4), "gemma-2": (_GEMMA, 4), "glm-4": (_GLM, 4), "deepseek-v2": (_DEEPSEEK, 5)}
SCHEMES: dict[str, dict[str, Any]] = {
    "blocks": DEEPSEEK,
    "channels": COMPRESSED_DYNAMIC,
    "given": AUTO_FP8,
    "int8": int8_config(static=False),
    "int8-given": int8_config(static=True),
}


@by_format
@pytest.mark.parametrize(("size", "dtype"), NORMS, ids=str)
def test_norms_have_the_bits_of_separate_kernels(size: int, dtype: torch.dtype, row_format: RowFormat) -> None:
    torch.manual_seed(0)
    norm, update_norm = norm_of(RMSNorm, size, dtype), norm_of(GemmaRMSNorm, size, dtype)
    for tokens in TOKENS:
        x_TD, stream_TD = (rows(tokens, size, dtype).contiguous() for _ in range(2))
        ours = norms.norm_and_quantize(x_TD, None, norm, row_format)
        assert_same(ours, norms.rms_norm(x_TD, norm), row_format)
        before = update_norm if size == 4096 else None
        separate_TD = stream_TD.clone()
        ours = norms.norm_and_quantize(stream_TD, x_TD, norm, row_format, update_norm=before)
        normed_TD = norms.add_rms_norm(separate_TD, x_TD, norm, update_norm=before)
        assert torch.equal(stream_TD, separate_TD), tokens
        assert_same(ours, normed_TD, row_format)


@by_format
@pytest.mark.parametrize("size", [1104, 14336, 28672, 33000])
def test_activations_have_the_bits_of_separate_kernels(size: int, row_format: RowFormat) -> None:
    torch.manual_seed(0)
    kernel = activation.gelu_tanh_and_multiply if size == 1104 else activation.silu_and_multiply
    for tokens in TOKENS:
        gate_up_TI = rows(tokens, 2 * size, torch.bfloat16).contiguous()
        ours = activation.activate_and_quantize(gate_up_TI, row_format, tanh_gelu=size == 1104)
        assert_same(ours, kernel(gate_up_TI), row_format)


@needs_fp8
@pytest.mark.parametrize("tokens", [1, 32, 33, 66, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_norm_and_mlp_replay_as_separate_kernels(kind: str, tokens: int) -> None:
    torch.manual_seed(0)
    mlp, norm = mlp_of(KINDS[kind]), norm_of(RMSNorm, 288, torch.bfloat16)
    x_TD, update_TD = (torch.randn(tokens, 288, device="cuda").bfloat16() for _ in range(2))

    def compute() -> Tensor:
        out_TD: Tensor = mlp(norm.add_and_norm_for(mlp, x_TD.clone(), update_TD))
        return out_TD

    compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours_TD = compute()
    for _ in range(3):
        x_TD.normal_()
        update_TD.normal_()
        graph.replay()
        activated_TI = activation.silu_and_multiply(mlp.gate_up_proj(norms.add_rms_norm(x_TD.clone(), update_TD, norm)))
        assert torch.equal(ours_TD, mlp.down_proj(activated_TI))


def logits_of(directory: Path, dtype: str) -> Tensor:
    """Of a prompt whose tokens the library pads, of a decode with another prompt, and of two decodes: STEPS in all."""
    config = read_config(directory)
    backend = backend_for(config, dtype, device="cuda")
    model = load_model(directory, config, backend=backend, dtype=dtype, device="cuda", load_format="dummy")
    driver = PagedDriver(model, backend, dtype, device="cuda")
    first, second = (torch.randint(512, (80,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(2))
    steps = [{"a": first[:66]}, {"a": first[66:67], "b": second[:70]}, {"a": first[67:68], "b": second[70:71]}]
    return torch.cat([torch.cat(list(driver.step(step).values())) for step in steps])


@needs_fp8
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_computes_the_same_with_and_without_fusing(
    model: str, scheme: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, linear_layers = MODELS[model]
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEMES[scheme]}))
    alone: list[int] = []

    def count(x_TK: Tensor, row_format: RowFormat) -> QuantizedRows:
        alone.append(len(x_TK))
        return quantize(x_TK, row_format)

    monkeypatch.setattr(fp8_linear, "quantize", count)
    monkeypatch.setattr(int8_linear, "quantize", count)
    fused = logits_of(tmp_path, dtype)
    # Norms and activations quantize all other inputs. The attention itself quantizes its output in blocks, as the
    # projection reads it, in steps with nothing but decodes; MLA has no such kernel.
    attention_quantizes = scheme == "blocks" and model != "deepseek-v2"
    assert len(alone) == LAYERS * (STEPS - 1 if attention_quantizes else STEPS), "attention's outputs"
    alone.clear()
    never: Callable[[Fp8Linear | Int8Linear, int], None] = lambda layer, num_tokens: None  # noqa: E731
    monkeypatch.setattr(Fp8Linear, "row_format", never)
    monkeypatch.setattr(Int8Linear, "row_format", never)
    separate = logits_of(tmp_path, dtype)
    assert len(alone) == linear_layers * LAYERS * STEPS
    assert torch.equal(fused, separate)
    assert bool(fused.isfinite().all())
    assert float(fused.std()) > 0
