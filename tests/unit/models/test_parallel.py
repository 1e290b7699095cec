"""A model split over several ranks equals the model on one rank. `test_parallel_parts` tests which rank has which part,
and which splits are refused."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from attention.blocksparse_mask import token_mask
from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.checkpoint.tensor_reader import read_tensor
from baton.models.config.model_config import GQAConfig, ModelConfig
from baton.models.families.hybrid.mamba_config import MambaSwitches
from baton.models.families.reader import read_config
from baton.models.layers.linear import Linear
from baton.models.layers.parallel import TensorParallel, kv_heads
from baton.models.loading.expert_names import in_our_names
from baton.models.loading.loader import checkpoint_views, load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.shares import Shares
from baton.models.quantization.fp8_linear import Fp8Linear
from baton.models.quantization.int8_linear import Int8Linear
from baton.models.quantization.packed_linear import PackedLinear
from tests.ranks import run_ranks
from tests.unit.models import (
    tiny,
    tiny_delta,
    tiny_dense,
    tiny_gemma,
    tiny_hybrid,
    tiny_latent,
    tiny_moe,
    tiny_sparse,
    tiny_ssm,
)
from tests.unit.models.fp8_checkpoints import by_block, by_channel, save_fp8
from tests.unit.models.packed_checkpoints import (
    AWQ_CONFIG,
    gptq_config,
    int8_config,
    packed_config,
    save_gpt_oss,
    save_packed,
)
from tests.unit.models.paged import backend_for
from tests.unit.models.phi3_small_checkpoint import TINY as PHI3_SMALL
from tests.unit.models.phi3_small_checkpoint import save_phi3_small
from tests.unit.models.split import PROMPT_TOKENS, Run, ranks, run_model, run_split
from tests.unit.models.test_quantization import COMPRESSED_DYNAMIC, DEEPSEEK
from tests.unit.models.tiny import save_tiny

# With two kv heads where there are any, so that four ranks hold each of them twice.
BY_TWO = ("qwen3-window-by-layer-types", "deepseek-v3", "llama4", "gpt-oss", "bloom", "falcon-new")
LAYER_NORMS = ("starcoder2", "gpt-neox", "gpt2", "opt-norms-after-projections", "mpt")
SPLIT = (
    "nemotron-wide-heads-biases",
    "llama-llama3-tied",
    "llama-linear-biases-wide-heads",
    "deepseek-v2-q-lora-groups-yarn",
    "gemma2-untied-biases-no-caps",
    "gemma3-untied-layer-types-cap",
    "llama4-all-experts-two-of-them-biases",
    "falcon-multi-query-alibi",
    "falcon-rotary",
    *tiny_moe.SPLIT,
    *tiny_gemma.BY_FOUR,
    "phi3-longrope-partial",
    "stablelm-parallel-head-norms-biases",
    *BY_TWO,
    *tiny_dense.SPLIT,
    *tiny_delta.SPLIT,
    *tiny_hybrid.SPLIT,
)
# Six heads, whose slopes are not a geometric sequence; and five, which ranks cannot share evenly.
SIX_HEADS, FIVE_HEADS = "falcon-rw-untied-six-heads", "falcon-multi-query-five-heads"
MULTI_QUERY, RESIDUAL_AFTER_NORM = "llama with one kv head", "bloom untied with its residual after the norm"
BY_NAME: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        MULTI_QUERY: ("llama", {"num_key_value_heads": 1}),
        RESIDUAL_AFTER_NORM: (
            "bloom",
            {"tie_word_embeddings": False, "apply_residual_connection_post_layernorm": True},
        ),
    }
)
# Blocks of one token, so that the prompt has several, and stripes that move by two blocks from head to head.
SPARSE, SPARSE_MULTI_QUERY = "phi-3-small", "phi-3-small with one kv head"
SHORT_BLOCKS = PHI3_SMALL | {"blocksparse_block_size": 1, "blocksparse_vert_stride": 8, "mup_width_multiplier": 2.0}
PHI3_SMALL_BY_NAME = {SPARSE: SHORT_BLOCKS, SPARSE_MULTI_QUERY: SHORT_BLOCKS | {"num_key_value_heads": 1}}
PACKED: Mapping[str, Callable[[Path], Any]] = MappingProxyType(
    {
        "llama in gptq with reordered inputs": lambda path: save_packed("Llama", path, gptq_config(desc_act=True)),
        "llama in awq": lambda path: save_packed("Llama", path, AWQ_CONFIG),
        "llama in int8": lambda path: save_packed("Llama", path, int8_config(static=False)),
        "deepseek in w4a16": lambda path: save_packed("DeepseekV3", path, packed_config(symmetric=False)),
        "gpt-oss in mxfp4": save_gpt_oss,
    }
)
QUANTIZED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "phi-3 in fp8 by channel": (4,),
        "llama in fp8 by channel": (4,),
        "llama in fp8 by block": (2,),
        "deepseek in fp8 by block": (2,),
        "qwen2-moe in fp8 by block": (2,),
    }
    | dict.fromkeys(PACKED, (2,))
)
PLAIN: Mapping[str, tuple[int, ...]] = MappingProxyType(
    dict.fromkeys((*SPLIT, MULTI_QUERY), (4,))
    | dict.fromkeys((*BY_TWO, "olmo2", "glm4", *tiny_gemma.BY_TWO, *LAYER_NORMS, FIVE_HEADS, SPARSE), (2, 4))
    | dict.fromkeys((*tiny_sparse.SPLIT, *tiny_latent.SPLIT, *tiny_moe.BY_BOTH), (2, 4))
    | dict.fromkeys((*tiny_ssm.SPLIT, *tiny_hybrid.SPLIT), (2, 4))
    | dict.fromkeys(("phi3-window", "stablelm", *tiny_delta.BY_TWO), (2,))
    | dict.fromkeys((SIX_HEADS, RESIDUAL_AFTER_NORM, SPARSE_MULTI_QUERY), (2,))
)
SIZES = {**PLAIN, **QUANTIZED}
RECURRENT = (*tiny_hybrid.SPLIT, *tiny_ssm.SPLIT, *tiny_delta.SPLIT, *tiny_delta.BY_TWO)
WIDE_LLAMA = {"head_dim": 128}
WIDE_QWEN2_MOE = {"head_dim": 128, "shared_expert_intermediate_size": 256, "moe_intermediate_size": 272}
WIDE_DEEPSEEK = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        changed = {name: (tiny.TINY[base][0], tiny.TINY[base][1] | fields) for name, (base, fields) in BY_NAME.items()}
        patch.setattr(tiny, "TINY", {**tiny.TINY, **changed})
        for name in PLAIN.keys() - PHI3_SMALL_BY_NAME.keys():
            save_tiny(name, root / name)
    for name, values in PHI3_SMALL_BY_NAME.items():
        (root / name).mkdir()
        save_phi3_small(root / name, values)
    by_name: dict[str, Callable[[Path], Any]] = {
        "llama in fp8 by channel": lambda path: save_fp8(
            "Llama", path, by_channel, COMPRESSED_DYNAMIC, scale_name="weight_scale"
        ),
        "phi-3 in fp8 by channel": lambda path: save_fp8(
            "Phi3", path, by_channel, COMPRESSED_DYNAMIC, scale_name="weight_scale"
        ),
        "llama in fp8 by block": lambda path: save_fp8(
            "Llama", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE_LLAMA
        ),
        "deepseek in fp8 by block": lambda path: save_fp8(
            "DeepseekV3", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE_DEEPSEEK
        ),
        "qwen2-moe in fp8 by block": lambda path: save_fp8(
            "Qwen2Moe", path, by_block, DEEPSEEK, scale_name="weight_scale_inv", fields=WIDE_QWEN2_MOE
        ),
        **PACKED,
    }
    for name, save in by_name.items():
        save(root / name)
    return {name: root / name / "quantized" if name in by_name else root / name for name in SIZES}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Run]:
    return {name: run_model(directory) for name, directory in models.items()}


@pytest.fixture(scope="module")
def together(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, int], Run]]:
    """By rank."""
    return run_ranks(run_split, 4, tmp_path_factory.mktemp("ranks"), models, SIZES)


Together = list[dict[tuple[str, int], Run]]
every_split = pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes]
)


@every_split
def test_logits_are_those_of_the_whole_model(name: str, size: int, alone: dict[str, Run], together: Together) -> None:
    expected, ours = alone[name].logits, together[0][name, size].logits
    assert torch.equal(ours == -torch.inf, expected == -torch.inf), "tokens that are never sampled"
    expected, ours = (logits.masked_fill(logits == -torch.inf, 0) for logits in (expected, ours))
    assert float(expected.std()) > 0.1, "a reference without spread proves nothing"
    assert float((ours - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))
    assert together[0][name, size].tokens == alone[name].tokens


@every_split
def test_every_rank_has_the_same_bits_of_all_logits(name: str, size: int, together: Together) -> None:
    first, *others = (together[rank][name, size] for rank in range(size))
    assert all(torch.equal(other.logits, first.logits) for other in others)


@every_split
def test_each_rank_caches_its_heads_and_no_others(
    name: str, size: int, alone: dict[str, Run], together: Together
) -> None:
    whole = alone[name].cache
    for parallel in ranks(size):
        heads = kv_heads(whole.shape[4], parallel)
        expected = whole[:, :, :, :, heads.start : heads.stop]
        own = together[parallel.rank][name, size].cache
        # KV of recurrent models follows from their states, and has the bound of these.
        bound = 1e-4 if name in RECURRENT else 1e-5
        torch.testing.assert_close(own, expected, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name in RECURRENT for size in SIZES[name]])
def test_each_rank_keeps_the_states_of_its_heads(
    name: str, size: int, alone: dict[str, Run], together: Together
) -> None:
    """Also where ranks have parts of a group of heads that share inputs."""
    whole = alone[name].state
    assert whole is not None
    for parallel in ranks(size):
        heads = kv_heads(whole.shape[4], parallel)
        expected = whole[:, :, :, :, heads.start : heads.stop]
        own = together[parallel.rank][name, size].state
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in PLAIN.items() for size in sizes])
def test_the_ranks_hold_every_number_of_the_checkpoint(name: str, size: int, models: dict[str, Path]) -> None:
    """A weight that no rank holds would be missing from a sum, and one that two ranks hold would count twice."""
    config, stored = read_config(models[name]), load_file(models[name] / "model.safetensors")
    renamed = in_our_names(read_checkpoint(models[name]), known=())
    stored |= {path: read_tensor(tensor) for path, tensor in renamed.items()}
    times_held: dict[str, torch.Tensor] = {}
    for parallel in ranks(size):
        backend, shares = backend_for(local_config(config, parallel)), Shares(config, parallel)
        model = load_model(models[name], config, backend=backend, dtype="float32", device="cpu", parallel=parallel)
        for path, view in checkpoint_views(model).items():
            share = shares.of(path)
            if share is None:
                assert torch.equal(view, stored[path]), path
                continue
            held = times_held.setdefault(path, torch.zeros_like(stored[path]))
            used = 0
            for part in share.ranges:
                held.narrow(share.dim, part.start, len(part)).add_(1)
                own = view.narrow(share.dim, used, len(part))
                assert torch.equal(own, stored[path].narrow(share.dim, part.start, len(part))), path
                used += len(part)
            assert not view.narrow(share.dim, used, view.shape[share.dim] - used).any(), path
    for path, held in times_held.items():
        assert torch.equal(held, expected_times(path, held, config, size)), path


def expected_times(path: str, held: torch.Tensor, config: ModelConfig, size: int) -> torch.Tensor:
    """Once; keys and values once more for each further rank that has queries of their kv head."""
    times, gqa = torch.ones_like(held), config.attention
    if not isinstance(gqa, GQAConfig):
        return times
    layer = re.search(r"layers\.(\d+)\.", path)
    copies = max(1, size // (gqa.heads_of(int(layer[1]))[0] if layer else gqa.num_kv_heads))
    if ".query_key_value." in path:
        times.unflatten(0, (gqa.num_kv_heads, -1, gqa.head_dim))[:, -2:] = copies
    if ".qkv_proj." in path:
        times[gqa.num_heads * gqa.head_dim :] = copies
        return times
    if isinstance(config.switches, MambaSwitches) and config.recurrent is not None:
        inner = config.recurrent.num_heads * config.switches.head_dim
        shared = 2 * config.recurrent.num_groups * config.switches.state_size
        start = {"in_proj": 2 * inner, "conv1d": inner}.get(path.split(".")[-2])
        if start is not None:
            times[start : start + shared] = max(1, size // config.recurrent.num_groups)
    return times * copies if any(part in path for part in (".k_proj.", ".v_proj.", ".k_norm.")) else times


def test_phi3_small_s_patterns_differ_by_head_at_these_lengths(models: dict[str, Path]) -> None:
    """Else ranks that took the stripes of others' heads would not show."""
    gqa = read_config(models[SPARSE]).attention
    assert isinstance(gqa, GQAConfig)
    assert gqa.blocksparse[0] is not None
    masks = token_mask(gqa.blocksparse[0], np.arange(PROMPT_TOKENS), PROMPT_TOKENS)
    assert len({mask.tobytes() for mask in masks}) == gqa.num_heads


@pytest.mark.parametrize(
    "name",
    [
        "llama-linear-biases-wide-heads",
        "deepseek-v3",
        "llama4",
        "falcon-new",
        "bloom",
        "gpt2",
        "phi3-window",
        "opt-norms-after-projections",
        SPARSE,
    ],
)
def test_dummy_weights_are_parts_of_those_of_the_whole_model(name: str, models: dict[str, Path]) -> None:
    def views(parallel: TensorParallel) -> dict[str, torch.Tensor]:
        backend = backend_for(local_config(config, parallel))
        return checkpoint_views(
            load_model(
                models[name],
                config,
                backend=backend,
                dtype="float32",
                device="cpu",
                load_format="dummy",
                parallel=parallel,
            )
        )

    config = read_config(models[name])
    whole = views(TensorParallel())
    for parallel in ranks(4):
        shares = Shares(config, parallel)
        for path, view in views(parallel).items():
            share = shares.of(path)
            if share is None:
                assert torch.equal(view, whole[path]), path
            else:
                parts = [whole[path].narrow(share.dim, part.start, len(part)) for part in share.ranges]
                held = torch.cat([*parts, view.narrow(share.dim, 0, 0)], share.dim)
                assert torch.equal(view.narrow(share.dim, 0, held.shape[share.dim]), held), path


def test_fp8_weights_are_those_of_their_rows_and_columns(models: dict[str, Path]) -> None:
    directory = models["llama in fp8 by block"]
    config = read_config(directory)

    def layer(parallel: TensorParallel, path: str) -> torch.Tensor:
        backend = backend_for(local_config(config, parallel))
        model = load_model(directory, config, backend=backend, dtype="float32", device="cpu", parallel=parallel)
        module = model.get_submodule(path)
        assert isinstance(module, Fp8Linear)
        return module.dequantized(torch.float32)

    down, gate_up = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_up_proj"
    parts = [layer(parallel, down) for parallel in ranks(2)]
    assert [part.shape[1] for part in parts] == [128, 144], "cut between blocks, though not in the middle"
    assert torch.equal(torch.cat(parts, dim=1), layer(TensorParallel(), down))
    gates, ups = zip(*(layer(parallel, gate_up).chunk(2) for parallel in ranks(2)), strict=True)
    assert torch.equal(torch.cat((*gates, *ups)), layer(TensorParallel(), gate_up))


def test_ranks_hold_whole_groups_or_are_refused_with_the_sizes_that_do(models: dict[str, Path]) -> None:
    config = read_config(models["llama in awq"])
    with pytest.raises(ConfigError, match="16 channels of queries are not a multiple of 32") as refused:
        local_config(config, TensorParallel(0, 4))
    assert refused.value.allowed == ("1", "2")
    moe = local_config(read_config(models["gpt-oss in mxfp4"]), TensorParallel(1, 2)).moe
    assert moe is not None
    assert moe.intermediate_size == 64


@pytest.mark.parametrize("name", PACKED)
def test_ranks_draw_their_parts_of_one_model(name: str, models: dict[str, Path]) -> None:
    config = read_config(models[name])

    def weight(parallel: TensorParallel) -> torch.Tensor:
        backend = backend_for(local_config(config, parallel))
        model = load_model(
            models[name],
            config,
            backend=backend,
            dtype="float32",
            device="cpu",
            load_format="dummy",
            parallel=parallel,
        )
        layer = model.get_submodule("model.layers.1.self_attn.o_proj")
        assert isinstance(layer, Linear)
        return layer.dequantized(torch.float32) if isinstance(layer, PackedLinear | Int8Linear) else layer.weight

    assert torch.equal(torch.cat([weight(parallel) for parallel in ranks(2)], dim=1), weight(TensorParallel()))
