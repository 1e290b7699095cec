"""Finds the tokenizer of a model directory: its tokenizer.json, or another file that is converted to one.

A converted file is cached under a hash of its source, so that a model directory may be read-only and a second start is
fast.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton.core.errors import ConfigError
from baton.core.regular_file import write_regular_file
from baton.models.config.file import ConfigFile, read_regular
from baton.models.loading.tokenizer_files import byte_pairs, sentencepiece_model
from baton.settings.config import tokenizer_file
from baton.settings.environment import cache_directory

TEKKEN, TIKTOKEN, SENTENCEPIECE = "tekken.json", "tiktoken.model", "tokenizer.model"
OTHER_FORMS = (TEKKEN, TIKTOKEN, SENTENCEPIECE)
_SETTINGS = ("tokenizer_config.json", "added_tokens.json")
_VERSION = b"1"  # of the conversion


def tokenizer_json(directory: Path) -> Path:
    """Returns the path of the model's tokenizer.json, in `directory` or converted. If there is no tokenizer, the path
    does not exist.

    Raises:
        ConfigError: a file cannot be read or converted.
    """
    own = tokenizer_file(directory)
    source = next((directory / name for name in OTHER_FORMS if (directory / name).is_file()), None)
    if own.is_file() or source is None:
        return own
    contents = {path.name: read_regular(path) for path in (source, *_settings(directory))}
    name = f"{_digest(contents)}.json"
    folders = list(cache_folders("tokenizers"))
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    text = json.dumps(_convert(source, contents[source.name]), ensure_ascii=False)
    for folder in folders:
        if _write(folder / name, text):
            return folder / name
    raise ConfigError(
        f"{source} was converted to a tokenizer.json, and there is no place to keep it",
        field="model",
        value=directory,
        allowed=tuple(map(str, cache_places("tokenizers"))),
        cure="make one of these folders writable, or put a tokenizer.json beside config.json",
    )


def _convert(source: Path, data: bytes) -> dict[str, Any]:
    """Converts a file to tokenizer.json. Raises ConfigError if it has another form or an unsupported feature."""
    config, added = (_values(path) for path in (source.with_name(name) for name in _SETTINGS))
    converters: dict[str, Callable[[], dict[str, Any]]] = {
        TEKKEN: lambda: byte_pairs.convert_tekken(data.decode()),
        TIKTOKEN: lambda: byte_pairs.convert_kimi(data.decode(), config),
        SENTENCEPIECE: lambda: sentencepiece_model.convert(data, config, added),
    }
    if source.name == TIKTOKEN and config.get("tokenizer_class") != "TikTokenTokenizer":
        # The file has no pattern: code that Baton does not run splits the text.
        raise ConfigError(
            f"{source}: tokenizer_class of tokenizer_config.json is {config.get('tokenizer_class')!r}",
            field="model",
            value=str(source.parent),
            allowed=("TikTokenTokenizer",),
            cure="put a tokenizer.json beside config.json",
        )
    try:
        return converters[source.name]()
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{source} cannot be converted to a tokenizer.json: {missing}",
            field="model",
            value=str(source.parent),
            cure="put a tokenizer.json beside config.json",
        ) from error


def _settings(directory: Path) -> Iterator[Path]:
    return (directory / name for name in _SETTINGS if (directory / name).is_file())


def _values(path: Path) -> dict[str, Any]:
    return dict(ConfigFile.read(path).values) if path.is_file() else {}


def _digest(contents: dict[str, bytes]) -> str:
    digest = hashlib.sha256(_VERSION)
    for name in sorted(contents):
        digest.update(name.encode() + len(contents[name]).to_bytes(8, "little") + contents[name])
    return digest.hexdigest()


def cache_places(kind: str) -> Iterator[Path]:
    """Yields the folders that may keep converted files of a kind, best first."""
    if (cache := cache_directory()) is not None:
        yield cache / kind
    yield Path(tempfile.gettempdir()) / f"baton-{kind}-{os.getuid()}"


def cache_folders(kind: str) -> Iterator[Path]:
    """Yields the cache folders that this user owns, because files in another user's folder cannot be trusted."""
    for place in cache_places(kind):
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = place.lstat()
        except OSError:
            continue
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and place.is_dir() and not place.is_symlink():
            yield place


def _write(path: Path, text: str) -> bool:
    """Writes the file; returns whether a whole file exists now. Other processes may write the same file meanwhile."""
    try:
        write_regular_file(path, text)
    except OSError:
        return False
    return True
