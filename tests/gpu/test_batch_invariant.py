"""Batch-invariant mode on a GPU: sums of the tensor cores have the same bits in tiles of any size, and so have a
request's logits in bf16, alone and in any batch."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.sampling import ResolvedSampling
from baton.models.kernels.matmul.decode_matmul import DecodeTile
from baton.models.kernels.matmul.few_rows_in_order import NarrowTile, multiply_few_rows
from baton.models.kernels.matmul.matmul import (
    TILES,
    choose_tile,
    multiply_heads_invariant,
    multiply_in_tiles,
    multiply_invariant,
)
from baton.models.kernels.moe.expert_weights import ExpertWeights
from baton.models.kernels.moe.grouped_gemm import SharedWeights, run_gated_experts
from baton.settings.config import DEMO_MODELS
from tests.conformance.attention.oracle import relative_error
from tests.gpu.demo import build_demo, generate
from tests.invariance import Invariant, Lengths, differences, drawn_tokens, hidden_states
from tests.unit.attention.in_order import attend_in_order, in_order_plan
from tests.unit.attention.paged import Asked, decodes
from tests.unit.attention.test_decode_kernel import ASKED
from tests.unit.attention.test_decodes_in_order import AXES
from tests.unit.attention.test_prompts_in_order import computed, decoded
from tests.unit.models.tiny import save_tiny

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 8, 16, 17, 31, 32, 64, 100, 128, 256, 1000, 8192)
# (N, K) of Llama-3.1-8B, its head among them, and one that fills no tile.
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (1000, 1032))
SIZES = (2, 7, 33)
LENGTHS = Lengths(prompt=700, outputs=12, chunk=256, longest=900)
CHUNK = 64
GREEDY = ResolvedSampling(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=0)

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MISTRAL = _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 300}
_DEEPSEEK = _LLAMA | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 704,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
}
_SPARSE = _DEEPSEEK | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "q_lora_rank": 512,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 256,
}
MODELS = {"llama": _LLAMA, "mistral": _MISTRAL, "deepseek": _DEEPSEEK}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(("num_columns", "depth"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(num_columns: int, depth: int) -> None:
    most = 1000 if num_columns > 100000 else max(ROWS)
    x, weight, bias = random(most, depth), random(num_columns, depth), random(num_columns)
    together = multiply_invariant(x, weight, bias)
    assert relative_error(together[:256], x[:256].double() @ weight.double().t() + bias.double()) < 4e-3
    for num_rows in ROWS:
        start = num_rows * 7 % (most - min(num_rows, most) + 1)
        assert torch.equal(
            multiply_invariant(x[start : start + num_rows], weight, bias), together[start : start + num_rows]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_tile_sums_in_the_same_order(dtype: torch.dtype) -> None:
    # Sums that cancel and numbers of all sizes, so that another order would round otherwise.
    x = random(384, 4096, dtype=dtype) * torch.exp2(torch.randint(-6, 7, (384, 4096), device="cuda")).to(dtype)
    weight = random(1024, 4096, dtype=dtype)
    results = []
    for tile in TILES:
        results.append(x.new_empty(384, 1024))
        multiply_in_tiles(x, weight, None, results[-1], tile)
    assert all(torch.equal(result, results[0]) for result in results)
    for few in (NarrowTile(16, 128, 6, 4), NarrowTile(32, 128, 6, 4), DecodeTile(32, 64, 128, 4, 4)):
        out = x.new_empty(32, 1024)
        multiply_few_rows(x[:32], weight, None, out, few)
        assert torch.equal(out, results[0][:32]), few
    assert not torch.equal(x[:, :2048] @ weight[:, :2048].t() + x[:, 2048:] @ weight[:, 2048:].t(), results[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_have_the_same_bits_among_any_number_of_tokens(dtype: torch.dtype) -> None:
    """Few tokens take every tile, many tokens the kernel for prompts."""
    gate_up, down = (
        ExpertWeights(random(8, 2 * 704, 512, dtype=dtype) / 16),
        ExpertWeights(random(8, 512, 704, dtype=dtype) / 16),
    )
    shared = SharedWeights(random(2 * 1408, 512, dtype=dtype) / 16, random(512, 1408, dtype=dtype) / 16)
    x, weights = random(1500, 512, dtype=dtype), torch.rand(1500, 2, device="cuda")
    experts = torch.rand(1500, 8, device="cuda").topk(2).indices.int()

    def outputs(rows: slice, shared: SharedWeights | None) -> Tensor:
        return run_gated_experts(
            x[rows], weights[rows], experts[rows], gate_up, down, batch_invariant=True, shared=shared
        )

    for chosen in (None, shared):
        together = outputs(slice(0, 1500), chosen)
        for start, stop in ((0, 1), (3, 20), (700, 740), (40, 180), (1000, 1500)):
            assert torch.equal(outputs(slice(start, stop), chosen), together[start:stop]), (start, stop)


def test_a_row_has_the_same_bits_anywhere_in_a_tile() -> None:
    x, weight = random(512, 4096), random(6144, 4096)
    assert torch.equal(multiply_invariant(x.flip(0), weight), multiply_invariant(x, weight).flip(0))


def test_sizes_above_make_the_choice_take_every_tile() -> None:
    chosen = {choose_tile(rows, columns, num_sms=132) for rows in ROWS for columns, _ in SHAPES}
    assert chosen == set(TILES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("depth", "num_columns"), [(128, 512), (512, 128)])
def test_a_row_of_a_head_has_the_same_bits_among_any_number_of_rows(
    depth: int, num_columns: int, dtype: torch.dtype
) -> None:
    x_MHK, weight_HNK = random(300, 16, depth, dtype=dtype), random(16, num_columns, depth, dtype=dtype)
    together = torch.empty(300, 16, num_columns, dtype=dtype, device="cuda")
    multiply_heads_invariant(x_MHK.transpose(0, 1), weight_HNK.transpose(1, 2), together.transpose(0, 1))
    expected = torch.einsum("mhk,hnk->mhn", x_MHK.double(), weight_HNK.double())
    assert relative_error(together, expected) < (4e-3 if dtype is torch.bfloat16 else 1e-6)
    for num_rows in (1, 2, 16, 63, 64, 65, 256):
        some = torch.empty(num_rows, 16, num_columns, dtype=dtype, device="cuda")
        rows_HMK = x_MHK[-num_rows:].transpose(0, 1)
        multiply_heads_invariant(rows_HMK, weight_HNK.transpose(1, 2), some.transpose(0, 1))
        assert torch.equal(some, together[-num_rows:])


def test_in_float32_a_row_has_the_same_bits_among_any_number_of_rows() -> None:
    x, weight = random(300, 1024, dtype=torch.float32), random(512, 1024, dtype=torch.float32)
    together = multiply_invariant(x, weight)
    assert relative_error(together, x.double() @ weight.double().t()) < 1e-6
    for num_rows in (1, 2, 31, 32, 33, 128):
        assert torch.equal(multiply_invariant(x[-num_rows:], weight), together[-num_rows:])


@pytest.mark.parametrize(
    ("cache_dtype", "head_size", "heads"),
    [
        (None, 128, (32, 8)),
        (None, 128, (48, 1)),
        (None, 64, (8, 8)),
        (None, 256, (32, 8)),
        (torch.float8_e4m3fn, 128, (32, 8)),
        (torch.float8_e4m3fn, 64, (48, 1)),
        (torch.float8_e4m3fn, 256, (8, 8)),
    ],
)
def test_decodes_and_prompts_have_the_same_bits_with_keys_on_either_axis_of_a_product(
    cache_dtype: torch.dtype | None, head_size: int, heads: tuple[int, int]
) -> None:
    batch = decodes(
        [900, 200], num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size, dtype=torch.bfloat16,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    by_rows, by_columns = (
        attend_in_order(batch, Asked(), in_order_plan(batch, Asked(), rows=2), keys_axis=axis) for axis in AXES
    )
    assert torch.equal(by_rows, by_columns)
    for request, length in ((0, 900), (1, 200)):
        expected = decoded(batch, request, Asked())
        for chunk in (length, 77):
            cuts = [(request, start, min(start + chunk, length)) for start in range(0, length, chunk)]
            assert torch.equal(torch.cat(computed(batch, cuts, Asked())), expected)


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_decodes_and_prompts_have_the_same_bits_with_any_feature(asked: Asked) -> None:
    batch = decodes([400], head_size=128, dtype=torch.bfloat16)
    (ours,) = computed(batch, [(0, 0, 400)], asked)
    assert torch.equal(ours, decoded(batch, 0, asked))


@pytest.mark.parametrize("config", [*MODELS.values(), _SPARSE], ids=[*MODELS, "sparse"])
def test_a_token_has_the_same_bits_as_a_decode_and_in_any_chunk(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = Invariant(tmp_path, device="cuda", dtype="bfloat16", block_size=16, load_format="dummy")
    assert model.backend.capabilities.rows_in_order
    tokens = drawn_tokens(model, 1200)
    decoded = hidden_states(model, tokens, chunk=1)
    for chunk in (1200, 512, 100, 3):
        assert torch.equal(hidden_states(model, tokens, chunk=chunk), decoded), chunk


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "kimi-linear", "nemotron-h", "falcon-h1", "granite-hybrid"])
def test_a_token_of_a_model_with_states_has_the_same_bits_as_a_decode_and_in_any_chunk(
    name: str, tmp_path: Path
) -> None:
    save_tiny(name, tmp_path)
    model = Invariant(tmp_path, device="cuda", dtype="bfloat16", block_size=16)
    assert model.backend.capabilities.rows_in_order
    tokens = drawn_tokens(model, 300)
    decoded = hidden_states(model, tokens, chunk=1)
    assert decoded.isfinite().all()
    for chunk in (300, 128, 45, 3):
        assert torch.equal(hidden_states(model, tokens, chunk=chunk), decoded), chunk


@pytest.mark.parametrize("name", MODELS)
def test_a_request_has_the_same_logits_alone_and_in_any_batch(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]))
    block_size = 64 if name == "deepseek" else 16
    model = Invariant(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        block_size=block_size,
        num_blocks=2**16 // block_size,
        load_format="dummy",
        workspace_tokens=300,
    )
    assert differences(model, LENGTHS, SIZES) == {size: [] for size in SIZES}
    one_more = replace(LENGTHS, prompt=LENGTHS.chunk + 1, outputs=2)
    assert differences(model, one_more, SIZES) == {size: [] for size in SIZES}


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", [DEMO_MODELS / "llama", DEMO_MODELS / "deepseek"], ids=lambda model: model.name)
def test_the_engine_gives_a_request_the_same_logprobs_alone_and_in_any_batch(model: Path, cuda_graphs: bool) -> None:
    built = build_demo(model, dtype="bfloat16", cuda_graphs=cuda_graphs, batch_invariant=True)
    generator = torch.Generator().manual_seed(0)
    lengths = (CHUNK + 1, 3, CHUNK, 1, 200, 2 * CHUNK, *torch.randint(1, 150, (40,), generator=generator).tolist())
    prompts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in lengths]
    limits: dict[str, Any] = {"max_batch_requests": 48, "prefix_cache": False}

    def outputs(of: Sequence[Sequence[int]]) -> list[Any]:
        return generate(built, of, GREEDY, **limits)

    together = outputs(prompts)
    for index in range(6):
        assert outputs(prompts[index : index + 1]) == together[index : index + 1], lengths[index]


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("model", [DEMO_MODELS / "llama", DEMO_MODELS / "deepseek"], ids=lambda model: model.name)
def test_the_engine_cuts_prompts_anywhere_and_computes_known_tokens_with_them(model: Path, cuda_graphs: bool) -> None:
    built = build_demo(model, dtype="bfloat16", cuda_graphs=cuda_graphs, batch_invariant=True)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in (300, 3, 129, 1, 64)]

    def outputs(**more: Any) -> list[Any]:
        return generate(built, prompts, GREEDY, prefix_cache=False, **more)

    whole = outputs()
    for step_tokens in (48, 100):
        assert outputs(max_batch_tokens=step_tokens) == whole
    for lost in (1, 20):
        rest = outputs(known=[output.token_ids[:lost] for output in whole])
        assert [output.logprobs for output in rest] == [output.logprobs[lost:] for output in whole]


@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "nemotron-h", "deepseek-v2", "latent"])
def test_the_engine_cuts_prompts_of_other_models_anywhere(family: str, tmp_path: Path) -> None:
    """In captured steps; a longer prompt starts from a state that was kept while its beginning was decoded, and one of
    latent attention from steps that are not captured."""
    if family == "latent":  # with the sizes of the Hopper kernel
        (tmp_path / "config.json").write_text(json.dumps(_DEEPSEEK))
    else:
        save_tiny(family, tmp_path)
    options = {"load_format": "dummy"} if family == "latent" else {}
    built = build_demo(tmp_path, dtype="bfloat16", batch_invariant=True, block_size=16, **options)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in (200, 3, 129, 1, 50)]
    whole = generate(built, prompts, GREEDY, prefix_cache=False)
    assert built.runner.launches["prompt_graph"]
    for step_tokens in (48, 100):
        assert generate(built, prompts, GREEDY, prefix_cache=False, max_batch_tokens=step_tokens) == whole
    for lost in (1, 20):
        rest = generate(built, prompts, GREEDY, prefix_cache=False, known=[output.token_ids[:lost] for output in whole])
        assert [output.logprobs for output in rest] == [output.logprobs[lost:] for output in whole]
