"""The parameters of layers, and those that some backends need to be equal in all layers."""

import pytest

from attention.parameters import (
    AttentionParameters,
    PerLayerParameters,
    get_per_layer_parameters,
    infer_global_hyperparameters,
)
from baton.core.errors import ConfigError

LAYER = AttentionParameters(scale=0.125)


def test_a_windows_left_is_one_token_less_and_minus_one_without_a_window() -> None:
    per_layer = get_per_layer_parameters(
        {
            "full": LAYER,
            "local": AttentionParameters(scale=0.5, sliding_window=128, logits_soft_cap=30.0),
            "itself": AttentionParameters(scale=0.5, sliding_window=1),
        }
    )
    assert per_layer == {
        "full": PerLayerParameters(window_left=-1, logits_soft_cap=None, sm_scale=0.125),
        "local": PerLayerParameters(window_left=127, logits_soft_cap=30.0, sm_scale=0.5),
        "itself": PerLayerParameters(window_left=0, logits_soft_cap=None, sm_scale=0.5),
    }


def test_parameters_that_all_layers_share_are_the_models() -> None:
    layers = {f"layers.{index}": AttentionParameters(scale=0.5, sliding_window=7) for index in range(3)}
    shared = infer_global_hyperparameters(get_per_layer_parameters(layers))
    assert shared == PerLayerParameters(window_left=6, logits_soft_cap=None, sm_scale=0.5)


@pytest.mark.parametrize(
    "other",
    [
        AttentionParameters(scale=0.5),
        AttentionParameters(scale=0.125, sliding_window=7),
        AttentionParameters(scale=0.125, logits_soft_cap=30.0),
    ],
    ids=["scale", "window", "soft cap"],
)
def test_layers_that_disagree_are_named(other: AttentionParameters) -> None:
    layers = {"layers.0": LAYER, "layers.1": other, "layers.2": LAYER}
    with pytest.raises(ConfigError) as refusal:
        infer_global_hyperparameters(get_per_layer_parameters(layers))
    assert "in layers.0, layers.2;" in refusal.value.message
    assert refusal.value.message.endswith("in layers.1")
    assert "per layer" in refusal.value.cure


def test_parameters_that_backends_read_per_layer_may_differ() -> None:
    """Chunks are no reason to refuse a model: they are not compared."""
    layers = {"layers.0": LAYER, "layers.1": AttentionParameters(scale=0.125, attention_chunk_size=64)}
    assert infer_global_hyperparameters(get_per_layer_parameters(layers)).sm_scale == 0.125


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="no attention layers"):
        infer_global_hyperparameters({})
