"""Tiny random checkpoints in the forms in which embedding models and rerankers are published, saved by transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from baton.settings.config import DEMO_MODELS

_CONFIG: Mapping[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
_END = "<|endoftext|>"
_TEMPLATE = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no")
_MODULE = "sentence_transformers.models"


def tokenizer_of(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _save_tokenizer(directory: Path, *, ends: bool) -> Tokenizer:
    """The demo model's tokenizer, with the tokens of Qwen3-Reranker's template. `ends`: a text ends with a token."""
    tokenizer = tokenizer_of(DEMO_MODELS / "llama")
    tokenizer.add_special_tokens([_END, *_TEMPLATE[:2]])
    tokenizer.add_tokens(list(_TEMPLATE[2:]))
    if ends:
        pair = f"$A:0 {_END}:0 $B:1 {_END}:1"
        tokenizer.post_processor = TemplateProcessing(
            single=f"$A:0 {_END}:0", pair=pair, special_tokens=[(_END, tokenizer.token_to_id(_END))]
        )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=_END, eos_token=_END)
    fast.save_pretrained(directory)
    return tokenizer


def _save_model(directory: Path, name: str, vocab_size: int, **fields: Any) -> Any:
    torch.manual_seed(3)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**_CONFIG, "vocab_size": vocab_size, **fields})
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(directory)
    return model


def _save_modules(directory: Path, *steps: tuple[str, dict[str, Any] | None]) -> None:
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_MODULE}.Transformer"}]
    for index, (kind, config) in enumerate(steps, start=1):
        path = f"{index}_{kind}"
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"{_MODULE}.{kind}"})
        if config is not None:
            (directory / path).mkdir(exist_ok=True)
            (directory / path / "config.json").write_text(json.dumps(config))
    (directory / "modules.json").write_text(json.dumps(modules))


def save_embedding(
    directory: Path,
    *,
    model: str = "Qwen3Model",
    pooling: str = "lasttoken",
    normalize: bool = True,
    include_prompt: bool = True,
    prompts: Mapping[str, str] | None = None,
    default_prompt_name: str | None = None,
    max_seq_length: int | None = None,
    **fields: Any,
) -> Any:
    """Saves an embedding model. Like Qwen3-Embedding, it has no head, and a text ends with a special token.

    Args:
        model: class of transformers.
        fields: further fields of config.json.

    Returns:
        transformers' model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _save_tokenizer(directory, ends=True)
    saved = _save_model(directory, model, tokenizer.get_vocab_size(), **fields)
    names = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    modes = {f"pooling_mode_{name}": name.removesuffix("_tokens").removesuffix("_token") == pooling for name in names}
    steps: list[tuple[str, dict[str, Any] | None]] = [
        ("Pooling", {"word_embedding_dimension": _CONFIG["hidden_size"], **modes, "include_prompt": include_prompt})
    ]
    if normalize:
        steps.append(("Normalize", None))
    _save_modules(directory, *steps)
    sentence = {
        "prompts": dict(prompts or {}),
        "default_prompt_name": default_prompt_name,
        "similarity_fn_name": "cosine",
    }
    (directory / "config_sentence_transformers.json").write_text(json.dumps(sentence))
    length = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (directory / "sentence_bert_config.json").write_text(json.dumps(length))
    return saved


def save_reranker(directory: Path, *, from_config: bool = False) -> Any:
    """Saves a reranker as Qwen3-Reranker: a generative model whose logits of yes and no are compared.

    Args:
        from_config: config.json names the tokens, instead of a LogitScore step.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _save_tokenizer(directory, ends=False)
    saved = _save_model(directory, "Qwen3ForCausalLM", tokenizer.get_vocab_size(), tie_word_embeddings=True)
    yes, no = tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")
    if from_config:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"classifier_from_token": ["no", "yes"]}))
    else:
        _save_modules(directory, ("LogitScore", {"true_token_id": yes, "false_token_id": no}))
    return saved


def save_classifier(directory: Path) -> Any:
    """Saves a reranker with a classification head of one label."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _save_tokenizer(directory, ends=False)
    return _save_model(
        directory,
        "Qwen3ForSequenceClassification",
        tokenizer.get_vocab_size(),
        num_labels=1,
        pad_token_id=tokenizer.token_to_id(_END),
    )
