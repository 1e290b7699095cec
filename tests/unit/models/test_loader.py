"""Loading: every tensor goes to its parameter in the wanted dtype; errors name tensors that do not fit."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from baton.core.errors import ConfigError
from baton.models.checkpoint.names import EMBEDDING, HEAD, renamed
from baton.models.families.reader import read_config
from baton.models.layers.causal_lm import CausalLM
from baton.models.loading.loader import checkpoint_views, load_model
from tests.unit.models.paged import backend_for
from tests.unit.models.tiny import save_tiny

Tensors = dict[str, Tensor]


def load(directory: Path, *, dtype: str = "float32", load_format: str = "safetensors") -> CausalLM:
    config = read_config(directory)
    return load_model(
        directory, config, backend=backend_for(config), dtype=dtype, device="cpu", load_format=load_format
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return directory


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek")
    save_tiny("deepseek-v3", directory)
    return directory


@pytest.fixture(
    scope="module", params=["llama", "deepseek-v3", "gemma3", "llama4", "gpt-oss", "falcon-rw", "bloom", "gpt2"]
)
def any_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family")
    save_tiny(request.param, directory)
    return directory


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    save_file(change(tensors) or tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_float64_weights_are_converted_to_the_model_s_dtype(llama: Path, tmp_path: Path) -> None:
    wide = rewritten(llama, tmp_path, lambda tensors: {name: each.double() for name, each in tensors.items()})
    fields = json.loads((wide / "config.json").read_text())
    for named in ("float64", None):
        (wide / "config.json").write_text(json.dumps(fields | {"dtype": named}))
        assert read_config(wide).dtype == "float32"
        for dtype in ("float32", "bfloat16"):
            converted, expected = load(wide, dtype=dtype).state_dict(), load(llama, dtype=dtype).state_dict()
            assert all(torch.equal(converted[name], each) for name, each in expected.items())


def test_every_stored_tensor_fills_its_part(any_family: Path) -> None:
    views, stored = checkpoint_views(load(any_family)), load_file(any_family / "model.safetensors")
    assert views.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(views[name], tensor), name


def test_parts_are_the_parameters_memory_and_cover_it(any_family: Path) -> None:
    model = load(any_family)
    for view in checkpoint_views(model).values():
        view.fill_(3.0)
    assert all(bool((parameter == 3.0).all()) for parameter in model.parameters())


def test_dtype_is_converted(deepseek: Path) -> None:
    model, stored = load(deepseek, dtype="bfloat16"), load_file(deepseek / "model.safetensors")
    views = checkpoint_views(model)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(views[name], stored[name].bfloat16())
    router = "model.layers.1.mlp.gate.weight"
    assert torch.equal(views[router], stored[router])


def test_shards_load_like_one_file(llama: Path, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, max_shard_size="20KB")
    ours, expected = checkpoint_views(load(tmp_path)), checkpoint_views(load(llama))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_progress_counts_bytes_to_the_end(llama: Path) -> None:
    config = read_config(llama)
    calls: list[tuple[int, int]] = []
    load_model(
        llama,
        config,
        backend=backend_for(config),
        dtype="float32",
        device="cpu",
        progress=lambda done, total: calls.append((done, total)),
    )
    bytes_total = sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (bytes_total, bytes_total)


def test_dummy_weights_are_the_same_every_time_and_finite(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    first, second = (checkpoint_views(load(tmp_path, load_format="dummy")) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert bool((first["model.norm.weight"] == 1).all())
    assert 0.01 < float(first["lm_head.weight"].std()) < 0.03


def test_known_extras_are_ignored(deepseek: Path, tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4)

    load(rewritten(deepseek, tmp_path, add))


def test_copy_of_a_tied_embedding_is_ignored_but_another_head_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny("llama-llama3-tied", source)

    def add_head(tensors: Tensors, change: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change

    load(rewritten(source, tmp_path / "copy", lambda tensors: add_head(tensors, 0.0)))
    with pytest.raises(ConfigError, match=r"lm_head\.weight in model\.safetensors differs") as caught:
        load(rewritten(source, tmp_path / "other", lambda tensors: add_head(tensors, 0.5)))
    assert caught.value.field == "tie_word_embeddings"


TIED = [
    *("llama-llama3-tied", "gpt-oss-tied-yarn-no-biases", "falcon-rw", "bloom", "mixtral-window-tied", "gpt2", "mpt"),
    *(
        "cohere",
        "gemma2",
        "gemma3n",
        "gemma4-experts",
        "opt-no-biases-no-final-norm-tied-projections",
    ),
    *("granite-tied-biases", "qwen3-next-dense-layers-between-tied", "gpt-neox-in-sequence-no-attention-biases"),
]


@pytest.mark.parametrize("name", TIED)
def test_a_tied_embedding_may_be_saved_under_the_head_s_name_only(name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny(name, source)
    model = load(source)
    assert model.lm_head is None
    embedding, head = (renamed(path, model.checkpoint_prefixes) for path in (EMBEDDING, HEAD))

    def move(tensors: Tensors) -> None:
        tensors[head] = tensors.pop(embedding)

    moved = load(rewritten(source, tmp_path / "moved", move))
    assert torch.equal(moved.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_transformers_loads_a_tied_embedding_under_the_head_s_name_too(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = save_tiny("llama-llama3-tied", source)

    def move(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    moved = LlamaForCausalLM.from_pretrained(rewritten(source, tmp_path / "moved", move))
    assert torch.equal(moved.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("ties", [True, False])
def test_a_model_without_embedding_and_head_names_what_is_missing(ties: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_tiny("llama-llama3-tied" if ties else "llama", source)

    def drop(tensors: Tensors) -> None:
        del tensors["model.embed_tokens.weight"]

    with pytest.raises(ConfigError, match=r"missing: model\.embed_tokens\.weight"):
        load(rewritten(source, tmp_path / "dropped", drop))


def as_published(path: str) -> str:
    return f"language_model.{path}"


def as_since_transformers_4_52(path: str) -> str:
    return path if path == "lm_head.weight" else f"model.language_model.{path.removeprefix('model.')}"


@pytest.mark.parametrize("renamed", [as_published, as_since_transformers_4_52])
@pytest.mark.parametrize(
    ("name", "tower"), [("gemma3", "vision_tower"), ("llama4", "vision_model"), ("llama4", "model.vision_model")]
)
def test_the_language_model_of_a_multimodal_checkpoint_is_loaded(
    name: str, tower: str, renamed: Callable[[str], str], tmp_path: Path
) -> None:
    save_tiny(name, tmp_path)
    alone = checkpoint_views(load(tmp_path))

    def with_tower(tensors: Tensors) -> Tensors:
        text = {renamed(path): tensor for path, tensor in tensors.items()}
        return text | {f"{tower}.a.weight": torch.zeros(2), "multi_modal_projector.b": torch.zeros(2)}

    seeing = rewritten(tmp_path, tmp_path / "seeing", with_tower)
    config = json.loads((tmp_path / "config.json").read_text())
    (architecture,) = config.pop("architectures")
    nested = {"architectures": [architecture.replace("CausalLM", "ConditionalGeneration")], "text_config": config}
    (seeing / "config.json").write_text(json.dumps(nested))
    loaded = checkpoint_views(load(seeing))
    assert loaded.keys() == alone.keys()
    assert all(torch.equal(loaded[path], alone[path]) for path in alone)


@pytest.mark.parametrize(
    ("name", "first", "masks"),
    [
        ("bloom", "transformer.", ()),
        ("bloom-untied-five-heads-residual-after-norm", "transformer.", ()),
        ("gpt2", "transformer.", ("h.0.attn.bias", "h.1.attn.masked_bias")),
        ("opt-norms-after-projections", "model.", ()),
        ("gpt-neox", "", ("gpt_neox.layers.0.attention.bias", "gpt_neox.layers.1.attention.masked_bias")),
    ],
)
def test_checkpoints_as_they_were_published(name: str, first: str, masks: tuple[str, ...], tmp_path: Path) -> None:
    save_tiny(name, tmp_path)

    def as_published(tensors: Tensors) -> Tensors:
        shortened = {path.removeprefix(first): tensor for path, tensor in tensors.items()}
        return shortened | {mask: torch.zeros(1, 1, 4, 4) for mask in masks}

    published = rewritten(tmp_path, tmp_path / "published", as_published)
    ours, expected = checkpoint_views(load(published)), checkpoint_views(load(tmp_path))
    assert all(torch.equal(ours[path], expected[path]) for path in expected)


def test_sinks_stay_float32(tmp_path: Path) -> None:
    save_tiny("gpt-oss", tmp_path)
    model, stored = load(tmp_path, dtype="bfloat16"), load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.sinks"
    assert torch.equal(checkpoint_views(model)[name], stored[name])


def test_all_misfits_are_in_one_error(llama: Path, tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["lm_head.weight"] = torch.zeros(61, 16)
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)

    with pytest.raises(ConfigError) as caught:
        load(rewritten(llama, tmp_path, damage))
    message = str(caught.value)
    assert "2 missing: " in message
    assert "model.norm.weight" in message
    assert "model.layers.1.self_attn.k_proj.weight" in message
    assert "1 unexpected: model.layers.2.mlp.up_proj.weight in model.safetensors" in message
    assert "2 unfit: " in message
    assert "lm_head.weight in model.safetensors is [61, 16], the config needs [61, 32]" in message
    assert "model.layers.0.mlp.up_proj.weight in model.safetensors is I8, known are F64, F32" in message
    assert "one revision" in message
    assert "\n" not in message


def test_a_long_list_is_cut(llama: Path, tmp_path: Path) -> None:
    def keep_two(tensors: Tensors) -> Tensors:
        return {name: tensors[name] for name in ("lm_head.weight", "model.norm.weight")}

    with pytest.raises(ConfigError, match=r"19 missing: .*; \.\.\.") as caught:
        load(rewritten(llama, tmp_path, keep_two))
    assert str(caught.value).count("model.layers.") < 10


def test_a_file_that_contradicts_itself_is_one_line(llama: Path, tmp_path: Path) -> None:
    copy = rewritten(llama, tmp_path, lambda tensors: None)
    file = copy / "model.safetensors"
    content = file.read_bytes()
    assert b'"F32"' in content
    file.write_bytes(content.replace(b'"F32"', b'"F16"', 1))
    with pytest.raises(
        ConfigError, match=r"model\.safetensors says that .*, F16 \[.*\], is .*; download the checkpoint again"
    ) as caught:
        load(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "dtype", "load_format", "allowed"),
    [("load_format", "float32", "pickle", "dummy"), ("dtype", "int8", "dummy", "bfloat16")],
)
def test_unknown_values_are_refused(llama: Path, field: str, dtype: str, load_format: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(llama, dtype=dtype, load_format=load_format)
    assert caught.value.field == field
    assert allowed in caught.value.allowed


def test_config_of_another_size_is_refused(llama: Path) -> None:
    config = replace(read_config(llama), vocab_size=62)
    with pytest.raises(ConfigError, match=r"2 unfit: .*\[62, 32\]"):
        load_model(llama, config, backend=backend_for(config), dtype="float32", device="cpu")
