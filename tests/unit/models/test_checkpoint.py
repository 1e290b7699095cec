"""A checkpoint's files: found by name or by index; damage is one line that names the file."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import read_checkpoint

INDEX = "model.safetensors.index.json"


def test_header_gives_shape_dtype_and_place(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    save_file({"b": values, "a": torch.zeros(())}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tensors = read_checkpoint(tmp_path)
    assert list(tensors) == ["a", "b"]
    stored = tensors["b"]
    assert (stored.dtype, stored.shape) == ("BF16", (2, 3))
    raw = stored.file.read_bytes()[stored.start : stored.stop]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(2, 3), values)


def test_index_names_the_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "two.safetensors")
    save_file({"c": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    weight_map = {"b": "two.safetensors", "a": "one.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert {name: tensor.file.name for name, tensor in read_checkpoint(tmp_path).items()} == weight_map


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"has no weights; allowed: model\.safetensors, .*save_pretrained"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no weight_map"),
        ({"a": "../one.safetensors"}, "which is not a file name"),
        ({"a": 1}, "which is not a file name"),
        ({"a": "gone.safetensors"}, r"gone\.safetensors cannot be read: No such file"),
        ({"z": "one.safetensors"}, r"says that z is in one\.safetensors, which does not have it"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: dict[str, object], message: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(tmp_path)


def framed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", "cut off within its first 8 bytes"),
        (b"version https://git-lfs.github.com/spec/v1", "is not a safetensors file, or cut off"),
        (framed(b"{no"), "not JSON"),
        (framed(b"[1]"), "does not follow the safetensors format"),
        (framed(b'{"a": {"dtype": "F32"}}'), "does not follow the safetensors format"),
        (framed(b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'), "bytes where its header says"),
        (framed(b"[" * 100_000), "not JSON"),
        (framed(b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}'), "does not follow"),
        (framed(b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}'), "does not follow"),
        (framed(b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}'), "does not follow"),
        (framed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}'), "does not follow"),
        (framed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}'), "does not follow"),
        (framed(b'{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}'), "does not follow"),
        (framed(b'{"a": 1, "a": 2}'), "names 'a' twice"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
    assert "\n" not in str(caught.value)


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)},
        {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 8, 24)},
        # Of an unknown dtype, and one without numbers: their sizes must not go backwards either.
        {"a": entry("F32", [4], 0, 16), "b": entry("F4", [8], 16, 0), "c": entry("F32", [4], 0, 16)},
        {"a": entry("F32", [4], 0, 16), "b": entry("F32", [0], 16, 0), "c": entry("F32", [4], 0, 16)},
    ],
)
def test_tensors_that_overlap_are_refused(tmp_path: Path, header: dict[str, object]) -> None:
    stop = max(each["data_offsets"][1] for each in header.values())  # type: ignore[index]
    (tmp_path / "model.safetensors").write_bytes(framed(json.dumps(header).encode()) + bytes(stop))
    with pytest.raises(ConfigError, match=r"says that \w, \w+ \[\d\], is"):
        read_checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_that_of_the_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    for files in ({"a": "one.safetensors", "b": "one.safetensors"}, {"a": "two.safetensors", "b": "one.safetensors"}):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
        assert {name: tensor.file.name for name, tensor in read_checkpoint(tmp_path).items()} == files


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_checkpoint(tmp_path)
