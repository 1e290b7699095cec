"""Rotary tables and rotations against transformers' formulas and against complex multiplication."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import HunYuanDenseV1Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from baton.core.errors import ConfigError
from baton.models.config.file import ConfigFile
from baton.models.config.rope import LongRopeScaling, RopeConfig, read_rope
from baton.models.layers import rotary
from baton.models.layers.rotary import Rotary, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * pair for pair in range(24)],
    "long_factor": [1.0 + 2.0 * pair for pair in range(24)],
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.375},
        LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0},
        LLAMA3 | {"original_max_position_embeddings": 64},
        LLAMA3 | {"original_max_position_embeddings": 8192, "high_freq_factor": 1.0},
        YARN,
        YARN | {"truncate": False},
        YARN | {"beta_fast": 8, "beta_slow": 8, "original_max_position_embeddings": 64},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
        YARN | {"mscale": 1.0},
        YARN | {"attention_factor": 1.25},
        YARN | {"factor": 0.5},
        YARN | {"partial_rotary_factor": 0.75},
        YARN | {"factor": None},
        YARN | {"beta_fast": 0, "beta_slow": 0},
        {"rope_type": "dynamic", "factor": 4.0},
        LONGROPE,
        LONGROPE | {"factor": 8.0},
        LONGROPE | {"attention_factor": 1.25},
        LONGROPE | {"original_max_position_embeddings": 131072},
    ],
)
def test_frequencies_and_scale_equal_transformers(scaling: dict[str, Any]) -> None:
    parameters = {"rope_theta": 10000.0} | scaling
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=dict(parameters)
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)

    table = ConfigFile("test", parameters)
    rope = read_rope(
        table, dim=64, theta=1e4, interleaved=False, max_position_embeddings=131072, partial_rotary_factor=1.0
    )
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert Rotary(rope).scale == pytest.approx(expected_scale)
    if isinstance(rope.scaling, LongRopeScaling):
        expected, expected_scale = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=131073)
        long = replace(rope, scaling=replace(rope.scaling, long=True))
        torch.testing.assert_close(inverse_frequencies(long), expected, rtol=1e-6, atol=0)
        assert Rotary(long).scale == pytest.approx(expected_scale)


def test_hunyuan_s_alpha_enlarges_the_base() -> None:
    parameters = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
    config = HunYuanDenseV1Config(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=dict(parameters))
    rope = read_rope(
        ConfigFile("test", parameters), dim=64, theta=1e4, interleaved=False, max_position_embeddings=131072
    )
    expected = HunYuanDenseV1RotaryEmbedding(config).inv_freq
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ({"rope_type": "mrope", "mrope_section": [3, 2, 2]}, "mrope_section"),
        (LONGROPE | {"partial_rotary_factor": 0.5}, "short_factor"),
        (LONGROPE | {"short_factor": [1.0, "2"]}, "short_factor"),
        (LONGROPE | {"long_factor": []}, "long_factor"),
        (YARN | {"beta_fast": -1}, "beta_fast"),
        ({"rope_type": "dynamic", "short_factor": [1.0]}, "short_factor"),
    ],
)
def test_wrong_tables_are_refused_by_field(table: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_rope(
            ConfigFile("test", table),
            dim=64,
            theta=1e4,
            interleaved=False,
            max_position_embeddings=131072,
            partial_rotary_factor=1.0,
        )
    assert refused.value.field == field


def test_sections_of_an_image_s_axes_change_nothing_for_text() -> None:
    table = ConfigFile("test", {"type": "mrope", "mrope_section": [8, 12, 12]})
    rope = read_rope(table, dim=64, theta=1e4, interleaved=False, max_position_embeddings=131072)
    assert rope == RopeConfig(dim=64, theta=1e4, interleaved=False, scaling=None)


def test_frequencies_are_computed_on_the_host_wherever_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of a GPU differ in the last bit, and two nodes on different devices must turn keys by the same angles."""
    computed = []

    def remembered(rope: RopeConfig) -> torch.Tensor:
        computed.append(inverse_frequencies(rope))
        return computed[-1]

    monkeypatch.setattr(rotary, "inverse_frequencies", remembered)
    with torch.device("meta"):
        built = Rotary(RopeConfig(dim=8, theta=100.0, interleaved=False, scaling=None))
    assert [each.device.type for each in computed] == ["cpu"]
    assert built.frequencies.is_meta


def test_angles_of_the_longest_contexts_equal_transformers() -> None:
    parameters = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=dict(parameters))
    positions_T = torch.tensor([0, 8191, 131_071, 1_048_575, 10_485_759])
    cos_1TD, sin_1TD = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=torch.float32), positions_T[None])

    table = ConfigFile("test", parameters)
    rope = read_rope(table, dim=64, theta=1e4, interleaved=False, max_position_embeddings=131072)
    rotation = Rotary(rope)(positions_T)
    torch.testing.assert_close(rotation.cos_TP, cos_1TD[0, :, :32], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotation.sin_TP, sin_1TD[0, :, :32], rtol=0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_multiplication_by_a_complex_number(interleaved: bool, dtype: torch.dtype) -> None:
    rope = RopeConfig(dim=8, theta=100.0, interleaved=interleaved, scaling=None)
    x_THD = torch.randn(5, 3, 8).to(dtype)
    positions_T = torch.tensor([0, 1, 7, 7, 30])
    rotated_THD = Rotary(rope)(positions_T).apply(x_THD)

    angles = positions_T[:, None] * 100.0 ** -(torch.arange(4) / 4)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.unflatten(x_THD.float(), -1, (4, 2) if interleaved else (2, 4))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    expected = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    expected = expected if interleaved else expected.transpose(-1, -2)
    assert rotated_THD.dtype is dtype
    torch.testing.assert_close(
        rotated_THD, expected.flatten(-2).to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_channels_past_the_rotary_ones_do_not_turn(interleaved: bool) -> None:
    rotation = Rotary(RopeConfig(dim=6, theta=100.0, interleaved=interleaved, scaling=None))(torch.tensor([0, 3, 50]))
    x_THD = torch.randn(3, 2, 9)
    turned_THD = rotation.apply(x_THD)
    assert torch.equal(turned_THD[..., :6], rotation.apply(x_THD[..., :6]))
    assert torch.equal(turned_THD[..., 6:], x_THD[..., 6:])


@pytest.mark.parametrize(("in_table", "outside", "dim"), [(None, 0.5, 16), (0.25, 0.5, 8), (None, 1.0, 32)])
def test_a_table_s_part_of_the_head_counts_before_the_file_s(in_table: float | None, outside: float, dim: int) -> None:
    table = ConfigFile("test", {"partial_rotary_factor": in_table})
    rope = read_rope(
        table, dim=32, theta=1e4, interleaved=False, max_position_embeddings=64, partial_rotary_factor=outside
    )
    assert rope.dim == dim


def test_a_part_of_the_head_is_refused_where_the_family_turns_all_of_it() -> None:
    table = ConfigFile("test", {"partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.5"):
        read_rope(table, dim=32, theta=1e4, interleaved=False, max_position_embeddings=64)
