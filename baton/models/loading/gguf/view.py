"""Makes a directory in Hugging Face's form for a GGUF model, so that everything else reads all models alike.

The directory has config.json, the tokenizer's files and links to the weights, which stay in the GGUF files. It is kept
in the user's cache under a hash of all that it was made of.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from baton.core.errors import ConfigError
from baton.core.log_lines import escaped
from baton.models.checkpoint.gguf_header import SUFFIX, GgufHeader
from baton.models.checkpoint.gguf_tensors import GgufFamily, family_of_gguf, read_headers
from baton.models.loading.gguf.config import config_json
from baton.models.loading.gguf.tokenizer import tokenizer_files
from baton.models.loading.tokenizer_files import find
from baton.settings.model_source import find_model, is_of_a_package, sampling_of_package

_VERSION = b"1"  # of the conversion
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PARTS_MAX = 1000


def model_directory(model: Path, *, weights: bool = True) -> Path:
    """Finds a model as `find_model` does, and returns a directory in Hugging Face's form, also for a GGUF file.

    Raises:
        ConfigError: see `find_model`; or a GGUF file is damaged, unsupported or incomplete.
    """
    found = find_model(model, weights=weights)
    if found.suffix != SUFFIX or found.is_dir():
        return found
    name = str(model) if is_of_a_package(model) else _PART.sub(r"\g<stem>.gguf", found.name).removesuffix(SUFFIX)
    return view_of_gguf(found, name, sampling_of_package(model))


def view_of_gguf(file: Path, name: str, sampling: Mapping[str, float]) -> Path:
    """Returns the directory for a GGUF file, or for all parts of a model if the file is one of them.

    Args:
        name: of the directory, which is the model's name for clients.
        sampling: parameters that replace absent ones of requests.
    """
    files = parts_of(file)
    headers = read_headers(files)
    family = family_of_gguf(headers[0])
    key = _key(files, headers, sampling)
    folders = list(find.cache_folders("gguf"))
    for folder in folders:
        if (folder / key / name).is_dir():
            return folder / key / name
    contents = _contents(headers, family)
    if sampling:
        contents["generation_config.json"] = json.dumps(dict(sampling))
    for folder in folders:
        if _write(folder / key / name, contents, files):
            return folder / key / name
    raise ConfigError(
        f"{file} needs a directory for its config.json and tokenizer.json, and there is no place to keep it",
        field="model",
        value=escaped(str(file)),
        allowed=tuple(map(str, find.cache_places("gguf"))),
        cure="make one of these folders writable",
    )


def parts_of(file: Path) -> list[Path]:
    """Returns all files of the model that `file` is a part of, in order.

    Raises:
        ConfigError: parts are missing.
    """
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    count = int(part["count"])
    if not 0 < count <= _PARTS_MAX:
        raise ConfigError(
            f"{file} is one of {count} parts", field="model", value=count, allowed=(f"1 to {_PARTS_MAX}",)
        )
    files = [file.with_name(f"{part['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = [each.name for each in files if not each.is_file()]
    if missing:
        raise ConfigError(
            f"{file} is one of {count} parts, and {', '.join(missing[:3])} {'is' if len(missing) == 1 else 'are'} "
            f"not in its folder",
            field="model",
            value=str(file),
            cure="put all parts of the model into one directory",
        )
    return files


def _key(files: Sequence[Path], headers: Sequence[GgufHeader], sampling: Mapping[str, float]) -> str:
    digest = hashlib.sha256(_VERSION)
    if sampling:
        digest.update(json.dumps(dict(sampling)).encode())
    for file, header in zip(files, headers, strict=True):
        digest.update(f"{os.fsencode(file.resolve()).hex()} {header.sha256}\n".encode())  # links hold the place
    return digest.hexdigest()


def _contents(headers: list[GgufHeader], family: GgufFamily) -> dict[str, str]:
    """Returns the texts of the directory's files by name."""
    read = tokenizer_files(headers[0])
    contents = {
        "config.json": json.dumps(config_json(headers, family), indent=2),
        "tokenizer.json": json.dumps(read.tokenizer, ensure_ascii=False),
        "tokenizer_config.json": json.dumps(read.config, indent=2, ensure_ascii=False),
    }
    for name, template in read.templates.items():
        path = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        contents[path] = template
    return contents


def _write(directory: Path, contents: dict[str, str], files: Sequence[Path]) -> bool:
    """Makes the directory; returns whether it is whole now. Other processes may make the same one meanwhile."""
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".making-"))
    except OSError:
        return False
    try:
        for name, text in contents.items():
            (made / name).parent.mkdir(exist_ok=True)
            (made / name).write_text(text, encoding="utf-8")
        for number, file in enumerate(files, 1):
            (made / f"model-{number:05}{SUFFIX}").symlink_to(file.resolve())
        made.rename(directory)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        return directory.is_dir()  # another process was faster
    return True
