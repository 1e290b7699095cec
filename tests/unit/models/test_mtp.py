"""MTP layers of checkpoints over the paged cache: their logits equal a plain reference, in pieces of any length."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.core.errors import ConfigError
from baton.models.config.mtp import mtp_form, why_no_mtp, with_mtp
from baton.models.families.reader import read_config
from baton.models.layers.parallel import TensorParallel, with_experts_placed
from baton.models.loading.identity import config_digest
from baton.models.loading.loader import checkpoint_views, load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import kv_cache_spec
from baton.models.loading.shares import Shares
from baton.models.quantization.fp8_linear import Fp8Linear
from tests.unit.models.fp8_checkpoints import by_block, save_fp8
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.test_equals_transformers import assert_equal, tokens_of
from tests.unit.models.test_quantization import DEEPSEEK
from tests.unit.models.tiny import save_tiny
from tests.unit.models.tiny_mtp import MTPReference, save_with_mtp, take_last_layer

FAMILIES = (
    *("deepseek-v3", "deepseek-v3-yarn", "glm4-moe", "glm4-moe-lite"),
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "mimo"),
    *("deepseek-v32", "glm-moe-dsa-shared-selection"),
)
TOKENS = 24


class Pair:
    """A tiny model with its MTP layer twice: the reference and ours."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        self.reference: MTPReference = save_with_mtp(name, directory)
        self.config = with_mtp(read_config(directory))
        self.backend = backend_for(self.config)
        self.model = load_model(directory, self.config, backend=self.backend, dtype="float32", device="cpu")

    def driver(self) -> PagedDriver:
        return PagedDriver(self.model, self.backend)

    def expected(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of the model and of its MTP layer at all places but the last, whose next token is not known."""
        hidden_TD = self.reference.hidden(tokens[:-1])
        drafted_TD = self.reference.drafted(tokens[1:], self.reference.read(tokens[:-1]))
        return self.reference.logits(hidden_TD), self.reference.logits(drafted_TD)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("piece", [TOKENS, 7, 1])
def test_logits_equal_the_reference_in_pieces_of_any_length(pair: Pair, piece: int) -> None:
    tokens = tokens_of(piece, TOKENS + 1)
    driver, ours, drafted = pair.driver(), [], []
    for start in range(0, TOKENS, piece):
        stop = min(start + piece, TOKENS)
        ours.append(driver.step({"r": tokens[start:stop]}, following={"r": tokens[stop]})["r"])
        drafted.append(driver.drafted["r"])
    expected, expected_drafted = pair.expected(tokens)
    assert_equal(torch.cat(ours), expected)
    assert_equal(torch.cat(drafted), expected_drafted)
    assert float((expected - expected_drafted).abs().mean()) > 0.1, "the two predict different tokens"


def test_its_own_hidden_state_drafts_further_tokens(pair: Pair) -> None:
    """The second draft's place has the layer's own hidden state of the place before, and the first draft."""
    tokens = tokens_of(3, TOKENS + 1)
    hidden_TD = pair.reference.read(tokens[:-1])
    first_TD = pair.reference.drafted(tokens[1:], hidden_TD)
    draft = int(pair.reference.logits(first_TD[-1]).argmax())
    second_TD = pair.reference.drafted([*tokens[1:], draft], torch.cat((hidden_TD, first_TD[-1:])))

    driver = pair.driver()
    driver.step({"r": tokens[:-1]}, following={"r": tokens[-1]})
    assert int(driver.drafted["r"][-1].argmax()) == draft
    driver.continue_drafts({"r": draft})
    assert_equal(driver.drafted["r"], pair.reference.logits(second_TD[-1:]))


def test_a_batch_of_decodes_and_prompts_equals_each_alone(pair: Pair) -> None:
    sequences = {name: tokens_of(seed, 9 + seed) for seed, name in enumerate("abc")}
    driver = pair.driver()
    driver.step({"a": sequences["a"][:-2]}, following={"a": sequences["a"][-2]})
    batch = {"a": sequences["a"][-2:-1], "b": sequences["b"][:-1], "c": sequences["c"][:-1]}
    driver.step(batch, following={name: tokens[-1] for name, tokens in sequences.items()})
    for name, tokens in sequences.items():
        assert_equal(driver.drafted[name][-1], pair.expected(tokens)[1][-1])


def test_the_layer_is_left_out_unless_it_is_asked_for(pair: Pair) -> None:
    plain = read_config(pair.directory)
    model = load_model(pair.directory, plain, backend=backend_for(plain), dtype="float32", device="cpu")
    assert model.mtp is None
    assert kv_cache_spec(plain, "float32").draft is None
    assert config_digest(plain) == config_digest(pair.config), "KV of both kinds of nodes is of one model"


def test_its_kv_is_a_part_of_the_cache(pair: Pair) -> None:
    spec = kv_cache_spec(pair.config, "float32")
    index = None if spec.index is None else replace(spec.index, num_layers=1)
    plain = kv_cache_spec(read_config(pair.directory), "float32")
    assert spec.draft == replace(plain, num_layers=1, index=index, state=None)
    expected = spec, spec.index, spec.state, spec.draft, index
    assert list(spec.parts) == [part for part in expected if part is not None]
    more_bytes = 0 if index is None else index.bytes_per_token
    assert spec.bytes_per_token == plain.bytes_per_token + spec.bytes_per_token_layer + more_bytes
    assert [each.spec for each in PagedDriver(pair.model, pair.backend).cache.parts] == list(spec.parts)


def test_a_checkpoint_that_lacks_a_tensor_of_the_layer_is_refused(tmp_path: Path) -> None:
    save_tiny("deepseek-v3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": 1}))
    config = with_mtp(read_config(tmp_path))
    with pytest.raises(ConfigError, match=r"missing: model\.layers\.3\.\S*"):
        load_model(tmp_path, config, backend=backend_for(config), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama-llama3-tied", "no layers for multi-token prediction"),
        ("deepseek-v2", "no layers for multi-token prediction"),
        ("nemotron-h", "NemotronHForCausalLM"),
    ],
)
def test_other_models_say_why_they_have_no_such_layer(name: str, reason: str, tmp_path: Path) -> None:
    save_tiny(name, tmp_path)
    config = read_config(tmp_path)
    if reason == config.architecture:
        config = replace(config, mtp_layers=1)
    assert reason in why_no_mtp(config)
    assert with_mtp(config) is config


def test_a_multimodal_checkpoint_has_the_layer_next_to_its_language_model(tmp_path: Path) -> None:
    """Qwen3.5 with pictures, as published: only the language model's own tensors have its prefix."""
    reference = save_with_mtp("qwen3.5", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = {re.sub(r"^model\.", "model.language_model.", name): each for name, each in load_file(path).items()}
    assert any(name.startswith("mtp.layers.0.") for name in stored)
    save_file(stored, path, metadata={"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(nested | {"tie_word_embeddings": False}))
    config = with_mtp(read_config(tmp_path))
    assert config.drafts
    backend, tokens = backend_for(config), tokens_of(4, 13)
    driver = PagedDriver(load_model(tmp_path, config, backend=backend, dtype="float32", device="cpu"), backend)
    driver.step({"r": tokens[:-1]}, following={"r": tokens[-1]})
    expected_TD = reference.drafted(tokens[1:], reference.read(tokens[:-1]))
    assert_equal(driver.drafted["r"], reference.logits(expected_TD))


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_ranks_hold_their_parts_of_the_layer(pair: Pair, load_format: str, whole_experts: bool) -> None:
    whole_experts = whole_experts and pair.config.moe is not None

    def views(parallel: TensorParallel) -> dict[str, Tensor]:
        model = load_model(
            pair.directory,
            pair.config,
            backend=backend_for(local_config(pair.config, parallel)),
            dtype="float32",
            device="cpu",
            load_format=load_format,
            parallel=parallel,
        )
        assert model.mtp is not None
        prefixes = tuple(mtp_form(pair.config).prefixes(pair.config.num_layers).values())
        return {path: view for path, view in checkpoint_views(model).items() if path.startswith(prefixes)}

    whole, held_by = views(TensorParallel()), dict[str, set[int]]()
    for rank in range(2):
        parallel = TensorParallel(rank, 2, whole_experts=whole_experts)
        parallel = with_experts_placed(parallel, pair.config, redundant=0, load=None)
        shares = Shares(pair.config, parallel)
        for path, view in views(parallel).items():
            held_by.setdefault(path, set()).add(rank)
            share = shares.of(path)
            parts = [whole[path]]
            if share is not None:
                parts = [whole[path].narrow(share.dim, part.start, len(part)) for part in share.ranges]
            assert torch.equal(view, torch.cat(parts, 0 if share is None else share.dim)), path
    assert held_by.keys() == whole.keys(), "every tensor is on a rank"
    experts = {path: ranks for path, ranks in held_by.items() if ".experts." in path}
    assert bool(experts) == (pair.config.moe is not None)
    assert all(len(ranks) == (1 if whole_experts else 2) for ranks in experts.values())


def test_a_layer_with_weights_in_fp8_is_that_of_the_dequantized_weights(tmp_path: Path) -> None:
    """Its projection is stored unquantized, and so it stays."""
    saved = save_fp8("DeepseekV3", tmp_path, by_block, DEEPSEEK, scale_name="weight_scale_inv")
    tokens, drafted = tokens_of(8, 13), []
    for directory in (saved.quantized, saved.plain):
        take_last_layer(directory, 1)
        config = with_mtp(read_config(directory))
        backend = backend_for(config)
        model = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
        driver = PagedDriver(model, backend)
        driver.step({"r": tokens[:-1]}, following={"r": tokens[-1]})
        drafted.append(driver.drafted["r"])
        fp8 = [path for path, module in model.named_modules() if isinstance(module, Fp8Linear)]
        assert any(path.startswith("mtp.layer.") for path in fp8) == (directory == saved.quantized)
    torch.testing.assert_close(*drafted, rtol=1e-4, atol=1e-4)
