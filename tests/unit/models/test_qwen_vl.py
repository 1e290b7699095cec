"""The language models inside Qwen's vision models: text turns by three equal positions, which is plain rotation."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.core.errors import ConfigError
from baton.models.config.rope import YarnScaling
from baton.models.families.reader import read_config
from baton.models.loading.loader import load_model
from tests.unit.models import tiny_delta
from tests.unit.models.paged import PagedDriver, backend_for

_TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": _ROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_SPECIAL = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}


@dataclass(frozen=True)
class Case:
    family: str
    text: dict[str, Any]
    vision: dict[str, Any]
    others: dict[str, Any]

    def save(self, directory: Path) -> Any:
        """Returns transformers' model."""
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")(
            text_config=_TEXT | self.text, vision_config=_VISION | self.vision, **_SPECIAL, **self.others
        )
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{self.family}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for path, tensor in model.state_dict().items():
                if path.endswith(("norm.weight", "proj.bias")):  # transformers begins with ones and zeros
                    tensor.uniform_(0.5, 1.5)
                tiny_delta.draw(path, tensor)
        model.save_pretrained(directory)
        return model


CASES = {
    "qwen2-vl": Case("Qwen2VL", {"rope_parameters": _ROPE}, {"embed_dim": 16, "hidden_size": 32}, {}),
    "qwen2.5-vl-yarn-tied": Case(
        "Qwen2_5_VL",
        {"rope_parameters": _YARN},
        {"out_hidden_size": 32, "intermediate_size": 24},
        {"tie_word_embeddings": True},
    ),
    "qwen3-vl": Case(
        "Qwen3VL",
        {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, "head_dim": 16},
        {"out_hidden_size": 32, "intermediate_size": 24, "deepstack_visual_indexes": [0]},
        {},
    ),
    "qwen3.5-tied": Case(
        "Qwen3_5",
        _HYBRID | {"tie_word_embeddings": True},
        {"out_hidden_size": 32, "intermediate_size": 24},
        {"tie_word_embeddings": True},
    ),
    "qwen3.5-moe": Case(
        "Qwen3_5Moe",
        {name: value for name, value in (_HYBRID | _EXPERTS).items() if name != "intermediate_size"},
        {"out_hidden_size": 32, "intermediate_size": 24},
        {},
    ),
    "qwen3-vl-moe": Case(
        "Qwen3VLMoe",
        {"rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, "head_dim": 16}
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": [1]},
        {"out_hidden_size": 32, "intermediate_size": 24, "deepstack_visual_indexes": [0]},
        {},
    ),
}


@torch.inference_mode()
def assert_equal(directory: Path, reference: Any) -> None:
    config = read_config(directory)
    backend = backend_for(config)
    model = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
    tokens = torch.randint(57, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    driver = PagedDriver(model, backend)
    ours = torch.cat([driver.step({"r": piece})["r"] for piece in (tokens[:9], tokens[9:10], tokens[10:])])
    expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    assert float(expected.std()) > 0.1, "a reference without spread proves nothing"
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_text_equals_transformers(name: str, tmp_path: Path) -> None:
    assert_equal(tmp_path, CASES[name].save(tmp_path))


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl-yarn-tied"])
def test_files_are_read_as_published(name: str, tmp_path: Path) -> None:
    """With the language model's fields where a model of text alone has them."""
    reference = CASES[name].save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    if rope["rope_type"] == "default":
        rope = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = text | config | {"rope_theta": theta, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert_equal(tmp_path, reference)


def test_yarn_counts_next_to_the_sections(tmp_path: Path) -> None:
    CASES["qwen2.5-vl-yarn-tied"].save(tmp_path)
    rope = read_config(tmp_path).rope
    assert rope is not None
    assert isinstance(rope.scaling, YarnScaling)


def test_experts_are_published_inputs_first_and_saved_outputs_first(tmp_path: Path) -> None:
    reference = CASES["qwen3-vl-moe"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    assert [tuple(tensors[name].shape) for name in sorted(names)] == [(6, 32, 20), (6, 40, 32)]
    assert_equal(tmp_path, reference)
    published = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if name in names}
    save_file(tensors | published, tmp_path / "model.safetensors")
    assert_equal(tmp_path, reference)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_topk_prob", False),
        ("moe_intermediate_size", 16),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    ],
)
def test_what_qwen3_vl_moe_does_not_have_is_refused_by_name(field: str, value: object, tmp_path: Path) -> None:
    CASES["qwen3-vl-moe"].save(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path)
    assert refused.value.field == field
