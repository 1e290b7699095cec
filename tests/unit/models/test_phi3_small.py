"""Phi-3-small: its config.json, and its logits through a paged cache against a plain forward written from the published
description, on every backend that offers its pattern.

Legend: T tokens, D hidden channels, H query heads, K kv heads, C head channels, I MLP channels, V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import layer_norm

from attention.backend import AttentionBackend
from attention.backends.blocksparse import BlocksparseFlashAttention
from attention.backends.torch_sdpa import TorchSDPA
from attention.blocksparse import BlocksparseParams
from attention.platform import Platform
from baton.core.errors import ConfigError
from baton.models.config.model_config import GQAConfig
from baton.models.families.dense.phi3_small import gegelu
from baton.models.families.dense.phi3_small_config import Phi3SmallSwitches
from baton.models.families.reader import read_config
from baton.models.loading.loader import checkpoint_views, load_model
from baton.models.loading.needs import attention_needs
from tests.unit.models.paged import PagedDriver, backend_for, cache_shape
from tests.unit.models.phi3_small_checkpoint import PUBLISHED, save_phi3_small, write_config

HEADS, KV_HEADS, CHANNELS, VOCAB = 4, 2, 8, 61


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_phi3_small(tmp_path_factory.mktemp("phi3_small"))


def seen_by_definition(head: int, position: int, key: int) -> bool:
    """The published pattern, for one pair."""
    query_block, key_block = position // 16, key // 16
    local = query_block - key_block < 2
    vertical = (key_block + head * max(1, int(3 / HEADS)) + 1) % 3 == 0
    return key <= position and (local or vertical)


def rotate(x_TXC: Tensor) -> Tensor:
    positions_T = torch.arange(x_TXC.shape[0]) / 2.0
    angles_TC = positions_T[:, None] / 1000 ** (torch.arange(0, CHANNELS, 2) / CHANNELS)
    cos, sin = angles_TC.cos()[:, None], angles_TC.sin()[:, None]
    left, right = x_TXC.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def reference_logits(tensors: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """[T, V], the whole prompt at once."""
    num_tokens = len(tokens)
    sparse_HTT = torch.tensor(
        [[[seen_by_definition(h, t, s) for s in range(num_tokens)] for t in range(num_tokens)] for h in range(HEADS)]
    )
    dense_TT = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()

    def linear(name: str, x_TD: Tensor) -> Tensor:
        return x_TD @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name: str, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, (32,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-5)

    x_TD = tensors["model.embed_tokens.weight"][tokens] * 10
    for layer in range(3):
        name = f"model.layers.{layer}"
        qkv = linear(f"{name}.self_attn.query_key_value", norm(f"{name}.input_layernorm", x_TD))
        q, k, v = (
            torch.cat([group[:, kind] for group in qkv.view(num_tokens, KV_HEADS, 4, CHANNELS).unbind(1)], dim=1)
            for kind in (slice(0, 2), slice(2, 3), slice(3, 4))
        )
        k_THC, v_THC = (kv.repeat_interleave(2, dim=1) for kv in (rotate(k), v))
        scores_HTT = torch.einsum("thc,shc->hts", rotate(q), k_THC) * 3 / CHANNELS
        seen = dense_TT[None] if (layer + 1) % 2 == 0 else sparse_HTT
        attended = torch.einsum("hts,shc->thc", scores_HTT.masked_fill(~seen, -torch.inf).softmax(-1), v_THC)
        x_TD = x_TD + linear(f"{name}.self_attn.dense", attended.reshape(num_tokens, 32))
        up_TI = linear(f"{name}.mlp.up_proj", norm(f"{name}.post_attention_layernorm", x_TD))
        gate_TI, up_TI = up_TI[:, ::2].clamp(max=0.7), up_TI[:, 1::2].clamp(-0.7, 0.7)
        x_TD = x_TD + linear(f"{name}.mlp.down_proj", gate_TI * torch.sigmoid(1.702 * gate_TI) * (up_TI + 1))
    logits_TV = norm("model.final_layernorm", x_TD) @ tensors["model.embed_tokens.weight"].T / 8
    logits_TV[:, [3, 7]] = -torch.inf
    return logits_TV


@pytest.mark.parametrize("name", ["TORCH_SDPA", "BLOCKSPARSE_FLASH_ATTN"])
def test_logits_equal_the_published_model_through_chunks_and_decodes(checkpoint: Path, name: str) -> None:
    config = read_config(checkpoint)
    needs = attention_needs(config, dtype="float32", device="cpu", shape=cache_shape(config), max_num_reqs=8)
    made = {backend.capabilities.name: backend for backend in (TorchSDPA, BlocksparseFlashAttention)}[name]
    backend: AttentionBackend = made(needs, Platform("cpu", triton_interpreted=True), context_workspace_tokens=1)
    model = load_model(checkpoint, config, backend=backend, dtype="float32", device="cpu")
    driver = PagedDriver(model, backend)
    generator = torch.Generator().manual_seed(2)
    one, other = (torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (82, 23))
    steps = [
        driver.step({"one": one[:37]}),
        driver.step({"one": one[37:80]}),
        driver.step({"one": one[80:81], "other": other[:22]}),
        driver.step({"one": one[81:], "other": other[22:]}),
    ]
    tensors = load_file(checkpoint / "model.safetensors")
    for request, tokens in (("one", one), ("other", other)):
        logits_TV = torch.cat([step[request] for step in steps if request in step])
        torch.testing.assert_close(logits_TV, reference_logits(tensors, tokens), atol=2e-4, rtol=2e-4)


def test_pattern_matters_at_these_lengths(checkpoint: Path) -> None:
    """Else the test above could not tell a dense model from a sparse one."""
    assert not all(seen_by_definition(head, 81, key) for head in range(HEADS) for key in range(81))


def test_published_config_is_read(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path, PUBLISHED))
    attention, switches = config.attention, config.switches
    assert isinstance(attention, GQAConfig)
    assert isinstance(switches, Phi3SmallSwitches)
    pattern = BlocksparseParams(
        max_seqlen=8192, num_heads=32, num_kv_heads=8, block_size=64, local_blocks=16, vert_stride=8
    )
    assert attention.blocksparse == (pattern, None) * 16
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 128)
    assert attention.scale == 1 / 128
    assert config.rope is not None
    assert (config.rope.theta, config.rope.scaling) == (1e6, None)
    assert (config.intermediate_size, config.norm_eps, config.tie_word_embeddings) == (14336, 1e-5, True)
    assert (switches.embedding_multiplier, switches.logits_divisor, switches.gegelu_limit) == (10.0, 8.0, 20.0)
    assert len(switches.unused_tokens) == 87
    assert {100256, 100264, 100351} <= set(switches.unused_tokens)
    assert not {100255, 100257, 100266, 100276} & set(switches.unused_tokens)  # text, end of text, end, end of prompt


@pytest.mark.parametrize(
    ("changed", "attribute", "expected"),
    [
        ({"gegelu_limit": None}, "gegelu_limit", None),
        ({"mup_embedding_multiplier": None}, "embedding_multiplier", 1.0),
        ({"mup_width_multiplier": 0}, "logits_divisor", 1.0),
        ({"vocab_size": 1000}, "unused_tokens", ()),
        ({"dummy_token_indices": [5]}, "unused_tokens", (5,)),
    ],
)
def test_switches_that_are_off_or_given(
    tmp_path: Path, changed: dict[str, Any], attribute: str, expected: object
) -> None:
    config = read_config(write_config(tmp_path, PUBLISHED | changed))
    assert getattr(config.switches, attribute) == expected


def test_without_dense_layers_and_without_mup_scaling(tmp_path: Path) -> None:
    changed = {"dense_attention_every_n_layers": None, "mup_use_scaling": False}
    attention = read_config(write_config(tmp_path, PUBLISHED | changed)).attention
    assert isinstance(attention, GQAConfig)
    assert None not in attention.blocksparse
    assert attention.scale == 128**-0.5


@pytest.mark.parametrize(
    "changed",
    [
        {"hidden_act": "silu"},
        {"rope_scaling": {"type": "longrope"}},
        {"ff_dim_multiplier": 4},
        {"blocksparse_vert_stride": 0},
        {"blocksparse_num_local_blocks": -1},
        {"mup_attn_multiplier": -1.0},
        {"dummy_token_indices": [100352]},
    ],
)
def test_unsupported_settings_are_refused_by_name(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        read_config(write_config(tmp_path, PUBLISHED | changed))


def test_every_parameter_has_its_published_name(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    model = load_model(checkpoint, config, backend=backend_for(config), dtype="float32", device="cpu")
    stored = load_file(checkpoint / "model.safetensors")
    views = checkpoint_views(model)
    assert set(views) == set(stored)
    assert all(torch.equal(views[name], stored[name]) for name in stored)


def test_gegelu_takes_pairs_and_clamps_the_gate_only_from_above() -> None:
    gate_up = torch.tensor([-9.0, 9.0, 9.0, -9.0])
    limited = gegelu(gate_up, 2.0)
    expected = torch.tensor(
        [-9 * torch.sigmoid(torch.tensor(1.702 * -9)) * 3, 2 * torch.sigmoid(torch.tensor(3.404)) * -1]
    )
    torch.testing.assert_close(limited, expected)
    assert gegelu(gate_up, None)[1] < -70
