"""The archive of a model's tokenizer: complete, and the same bytes wherever it is made."""

import hashlib
import io
import os
import zipfile
from pathlib import Path

from baton.gateway.grpc.tokenizer_archive import TokenizerArchive, make_archive
from baton.settings.config import DEMO_MODELS


def names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        return archive.namelist()


def write_model(directory: Path) -> Path:
    (directory / "additional_chat_templates").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors", "chat_template.jinja"):
        (directory / name).write_text(name)
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag")
    return directory


def test_it_has_the_tokenizers_files_and_no_weights(tmp_path: Path) -> None:
    archive = make_archive(write_model(tmp_path))
    assert names(archive.data) == [
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert archive.sha256 == hashlib.sha256(archive.data).hexdigest()
    assert b"".join(archive.pieces()) == archive.data


def test_equal_files_give_equal_bytes(tmp_path: Path) -> None:
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    os.utime(second / "tokenizer.json", (1, 1))
    (second / "config.json").chmod(0o600)
    assert make_archive(first).data == make_archive(second).data


def test_the_gateways_template_replaces_the_checkpoints(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("mine")
    archive = make_archive(write_model(tmp_path / "model"), template)
    with zipfile.ZipFile(io.BytesIO(archive.data)) as opened:
        assert opened.read("chat_template.jinja") == b"mine"


async def test_demo_models_have_the_tokenizer_that_they_share() -> None:
    archive = TokenizerArchive(DEMO_MODELS / "deepseek", None)
    first = await archive.get()
    assert "tokenizer.json" in names(first.data)
    assert await archive.get() is first
