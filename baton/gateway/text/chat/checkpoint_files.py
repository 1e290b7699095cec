"""Reads a checkpoint's chat templates, special tokens and model type from its files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.gateway.text.chat.checkpoint import DEFAULT, Checkpoint
from baton.models.config.file import read_regular, shown
from baton.models.loading.tokenizer_files.find import tokenizer_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_checkpoint(directory: Path, template_file: Path | None) -> Checkpoint:
    """Reads the files. `template_file`, if given, replaces all templates of the checkpoint.

    Raises:
        ConfigError: a file cannot be read, or has a wrong form.
    """
    config = _read_json(directory / "tokenizer_config.json")
    if template_file is not None:
        templates = {DEFAULT: _read_text(template_file)}
    else:
        templates = _template_files(directory) or _templates_of_config(directory, config)
    added = _added_tokens(tokenizer_json(directory))
    return Checkpoint(
        templates=templates,
        variables=_variables(directory, config),
        tokens={token["content"]: token["id"] for token in added},
        special=frozenset(token["content"] for token in added if token.get("special")),
        model_type=str(_read_json(directory / "config.json").get("model_type", "")),
    )


def _added_tokens(path: Path) -> list[dict[str, Any]]:
    """Returns the tokenizer's added tokens.

    Raises:
        ConfigError: an entry has no text or no id.
    """
    added = _read_json(path).get("added_tokens") or []
    entries: list[Any] = added if isinstance(added, list) else [None]
    for entry in entries:
        of = entry if isinstance(entry, dict) else {}
        if not isinstance(of.get("content"), str) or not isinstance(of.get("id"), int):
            raise ConfigError(f"{path}: added_tokens has {shown(entry)}", field="model", value=path.parent)
    return entries


def _template_files(directory: Path) -> dict[str, str]:
    templates = {}
    if (directory / "chat_template.jinja").is_file():
        templates[DEFAULT] = _read_text(directory / "chat_template.jinja")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    return templates


def _templates_of_config(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    template = config.get("chat_template")
    if template is None:
        # For a while, checkpoints of vision models had their template in a separate file.
        template = _read_json(directory / "chat_template.json").get("chat_template")
    try:
        if isinstance(template, list):
            return {str(named["name"]): str(named["template"]) for named in template}
    except (KeyError, TypeError) as error:
        path = directory / "tokenizer_config.json"
        raise ConfigError(
            f"{path}: chat_template has no names and templates", field="model", value=directory
        ) from error
    return {} if template is None else {DEFAULT: str(template)}


def _variables(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    # Older checkpoints have the special tokens in a separate file, which then takes precedence.
    named = dict(config)
    if "added_tokens_decoder" not in config:
        named |= _read_json(directory / "special_tokens_map.json")
    texts = {name: named[name] for name in NAMED_TOKENS if named.get(name) is not None}
    for name, text in texts.items():
        content = text.get("content") if isinstance(text, dict) else text
        if not isinstance(content, str):
            raise ConfigError(
                f"{name} of the tokenizer in {directory} is {shown(text)}",
                field="model",
                value=directory,
                allowed=("a string", "an object with content"),
            )
        texts[name] = content
    return texts


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in the file, or {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="model", value=path.parent) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object", field="model", value=path.parent)
    return value


def _read_text(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not readable: {error}", field="chat_template", value=path) from error
