"""Packs the model's tokenizer files into an archive that clients can download.

Equal files give equal bytes, so all gateways of a model have the same checksum. For that, names are sorted, times are
constant, and nothing is compressed, because compressed bytes depend on the library's version.
"""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.models.loading.tokenizer_files.find import tokenizer_json

_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "vocab.json",
)
_NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip archive can store
_PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class Archive:
    """A zip archive and its SHA-256, in hex."""

    data: bytes
    sha256: str

    def pieces(self) -> Iterator[bytes]:
        """Yields the archive in pieces of at most 64 KiB."""
        for start in range(0, len(self.data), _PIECE_BYTES):
            yield self.data[start : start + _PIECE_BYTES]


class TokenizerArchive:
    """The archive of one model directory, made at its first use and then kept.

    Args:
        chat_template: a file that replaces the directory's own template.
    """

    def __init__(self, directory: Path, chat_template: Path | None) -> None:
        self._directory = directory
        self._chat_template = chat_template
        self._archive: Archive | None = None
        self._making = asyncio.Lock()

    async def get(self) -> Archive:
        async with self._making:
            if self._archive is None:
                self._archive = await asyncio.to_thread(make_archive, self._directory, self._chat_template)
            return self._archive


def make_archive(directory: Path, chat_template: Path | None = None) -> Archive:
    """Packs the tokenizer files of a directory.

    Raises:
        OSError: a file cannot be read.
    """
    files = {"tokenizer.json": tokenizer_json(directory)}
    files |= {name: directory / name for name in _FILES if (directory / name).is_file()}
    files |= {str(path.relative_to(directory)): path for path in directory.glob(_NAMED_TEMPLATES)}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, _EARLIEST)
            entry.create_system = 3  # Unix; by default it depends on the platform
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, files[name].read_bytes())
    data = buffer.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())
