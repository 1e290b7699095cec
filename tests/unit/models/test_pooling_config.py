"""What a checkpoint says about its embeddings and scores, in the spellings that are published."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.errors import ConfigError
from baton.models.config.pooling import EmbeddingConfig, Pooling, ScoreConfig, read_embedding, read_score
from baton.models.families.reader import generative_name, read_config
from baton.settings.model_source import only_pools
from tests.pooling.checkpoints import save_classifier, save_embedding, save_reranker


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value))


def changed(path: Path, **values: Any) -> None:
    write(path, {**json.loads(path.read_text()), **values})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_embedding(tmp_path / "saved", prompts={"query": "query: "}, max_seq_length=77)
    return tmp_path / "saved"


def test_a_saved_embedding_model_has_no_head_and_says_how_it_pools(directory: Path) -> None:
    config = read_config(directory)
    assert (config.architecture, config.headless, config.tie_word_embeddings) == ("Qwen3ForCausalLM", True, True)
    assert read_embedding(directory) == EmbeddingConfig(
        Pooling.LAST, normalize=True, max_tokens=77, prompts={"query": "query: "}
    )
    assert read_score(directory) is None
    assert only_pools(directory)


@pytest.mark.parametrize("mode", ["lasttoken", "mean", "cls"])
def test_the_newer_spelling_names_the_mode(directory: Path, mode: str) -> None:
    write(directory / "1_Pooling/config.json", {"embedding_dimension": 48, "pooling_mode": mode})
    found = read_embedding(directory)
    assert found is not None
    assert found.pooling == mode


def test_pooling_files_next_to_a_generative_architecture_leave_its_head_unused(directory: Path) -> None:
    changed(directory / "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    assert read_config(directory).headless
    assert only_pools(directory)
    (directory / "modules.json").unlink()
    assert not read_config(directory).headless
    assert read_embedding(directory) is None
    assert not only_pools(directory)


def test_matryoshka_and_default_prompts_are_read(directory: Path) -> None:
    changed(directory / "config.json", matryoshka_dimensions=[16, 32])
    changed(directory / "config_sentence_transformers.json", default_prompt_name="query")
    found = read_embedding(directory)
    assert found is not None
    assert (found.matryoshka, found.matryoshka_dimensions, found.default_prompt) == (True, (16, 32), "query: ")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "max"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, "mean and cls"),
        ("1_Pooling/config.json", {"pooling_mode": 1}, "pooling_mode"),
        ("modules.json", {"type": "Pooling"}, "not a list of steps"),
        ("modules.json", [{"type": "a.Pooling", "path": "../elsewhere"}], "outside of the checkpoint"),
        ("modules.json", [{"type": "a.Pooling", "path": "/etc"}], "outside of the checkpoint"),
        ("modules.json", [{"path": ""}], "without type"),
        ("modules.json", [{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "2"}], "Dense"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name"),
    ],
    ids=str,
)
def test_what_is_not_supported_or_wrong_is_refused_by_name(directory: Path, name: str, value: Any, said: str) -> None:
    write(directory / name, value)
    with pytest.raises(ConfigError, match=said):
        read_embedding(directory)


def test_bidirectional_models_are_refused(directory: Path) -> None:
    changed(directory / "config.json", is_causal=False)
    with pytest.raises(ConfigError, match="is_causal"):
        read_config(directory)
    changed(directory / "config.json", architectures=["XLMRobertaModel"], is_causal=True)
    with pytest.raises(ConfigError, match="XLMRobertaModel"):
        read_config(directory)


def test_rerankers_in_their_published_forms(tmp_path: Path) -> None:
    save_reranker(tmp_path / "steps")
    steps = read_score(tmp_path / "steps")
    assert steps is not None
    assert isinstance(steps.yes, int)
    assert isinstance(steps.no, int)
    assert (steps.instruct, steps.sigmoid) == (True, True)
    assert not read_config(tmp_path / "steps").headless
    assert not only_pools(tmp_path / "steps")
    save_reranker(tmp_path / "config", from_config=True)
    assert read_score(tmp_path / "config") == ScoreConfig("yes", "no", instruct=True)
    save_classifier(tmp_path / "classifier")
    assert read_score(tmp_path / "classifier") == ScoreConfig()
    assert (read_config(tmp_path / "classifier").num_labels, only_pools(tmp_path / "classifier")) == (1, True)
    changed(tmp_path / "classifier/config.json", sentence_transformers={"activation_fn": "torch.nn.Identity"})
    assert read_score(tmp_path / "classifier") == ScoreConfig(sigmoid=False)
    changed(tmp_path / "classifier/config.json", id2label={"0": "a", "1": "b"})
    assert read_score(tmp_path / "classifier") is None
    assert read_config(tmp_path / "classifier").num_labels == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("MistralModel", "MistralForCausalLM"),
        ("Gemma3TextModel", "Gemma3ForCausalLM"),
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
    ],
)
def test_the_generative_architecture_of_one_without_its_head(given: str, expected: str) -> None:
    assert generative_name(given) == expected
