"""Targets: config.json of every family and quantization, adapters, and tokenizers in other forms."""

import base64
import io
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import sentencepiece
import torch
import transformers
from gguf import GGMLQuantizationType

from baton.gateway.text.tokenizer import TextTokenizer
from baton.models.adapters.adapter import LayerShape, read_adapter
from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig
from baton.models.families.reader import read_config
from baton.models.families.table import FAMILIES
from baton.models.layers.parallel import TensorParallel
from baton.models.loading.gguf.view import model_directory
from baton.models.loading.loader import load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import kv_cache_spec
from baton.models.loading.shares import Shares
from baton.models.loading.tokenizer_files import find
from tests.fuzz import mutate
from tests.fuzz.folders import in_folders
from tests.fuzz.target import Case, Targets
from tests.unit.models import tiny, tiny_gemma
from tests.unit.models.fp8_checkpoints import FAMILIES as FP8_FAMILIES
from tests.unit.models.gguf_files import write_gguf
from tests.unit.models.packed_checkpoints import AWQ_CONFIG, SIZES, gptq_config, int8_config, packed_config
from tests.unit.models.paged import backend_for

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 8, 10**9, 2**31, 2**63, 10**30, 0.0, 0.5, -1.5, 1e308, "", "x", "gelu"),
    *([], {}, [1], ["x"], [[0]], {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "longrope"}, "sigmoid", [None]),
)
_QUANTIZATIONS = (
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["model.layers.0", "re:.*gate"]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    AWQ_CONFIG,
    gptq_config(desc_act=True),
    gptq_config(bits=8, group_size=-1, checkpoint_format="gptq_v2"),
    packed_config(symmetric=False),
    packed_config(num_bits=8, strategy="channel"),
    int8_config(static=True),
    int8_config(static=False),
)
_WORDS = ("fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "re:[", "re:.*", "lm_head", "group", "channel", "tensor")
# A model of more numbers than this is read and not made.
_NUMBERS_MAX = 3_000_000


def _json(random: Random, sample: object, others: tuple[Any, ...] = _VALUES) -> bytes:
    if random.random() < 0.1:
        return mutate.data(random, json.dumps(sample).encode())
    return json.dumps(mutate.json_value(random, sample, others)).encode()


# ---- config.json


@cache
def _tiny_configs() -> tuple[dict[str, Any], ...]:
    """Of all families, as transformers writes them; of multimodal ones, with the language model in its table."""
    found: list[dict[str, Any]] = []
    suffixes = {"Gemma3": "TextConfig", "Llama4": "TextConfig", **tiny_gemma.CONFIG_SUFFIX}
    for family, fields in tiny.TINY.values():
        made = getattr(transformers, f"{family}{suffixes.get(family, 'Config')}")(**fields)
        values = json.loads(made.to_json_string(use_diff=False))
        found.append(values | {"architectures": [tiny.architecture_of(family)]})
    text = found[0]
    nested = (name for name, family in FAMILIES.items() if family.text_config)
    return (*found, *({"architectures": [name], "text_config": text} for name in nested))


def make_families(random: Random) -> Case:
    return (_json(random, random.choice(_tiny_configs())),)


def families(folder: Path, case: Case) -> None:
    (folder / "config.json").write_bytes(case[0])
    _make(folder)


def make_quantization(random: Random) -> Case:
    family = random.choice(("Llama", "DeepseekV3", "Mixtral", "Qwen2Moe", "GptOss"))
    fields = SIZES.get(family) or FP8_FAMILIES.get(family) or tiny.TINY["gpt-oss"][1]
    quantization = random.choice(_QUANTIZATIONS)
    if random.random() < 0.9:
        quantization = mutate.json_value(random, quantization, (*_VALUES, *_WORDS))
    values = fields | {"architectures": [f"{family}ForCausalLM"], "quantization_config": quantization}
    return (json.dumps(values).encode(),)


def quantization(folder: Path, case: Case) -> None:
    (folder / "config.json").write_bytes(case[0])
    _make(folder)


@torch.inference_mode()
def _make(folder: Path) -> None:
    """Reads the config, one of two ranks' part of it, and makes the model if it is small, with random weights."""
    config = read_config(folder)
    kv_cache_spec(config, "float32")
    config.for_context(None)
    if _numbers(config) > _NUMBERS_MAX:
        return
    backend = backend_for(config)
    if config.quantization is None:
        with torch.device("meta"):
            model = resolve_name(FAMILIES[config.architecture].model)(config, backend=backend, dtype=torch.float32)
        if sum(parameter.numel() for parameter in model.parameters()) > 4 * _NUMBERS_MAX:
            return
    load_model(folder, config, backend=backend, dtype="float32", device="cpu", load_format="dummy")
    local_config(config, TensorParallel(1, 2))
    Shares(config, TensorParallel(1, 2))


def _numbers(config: ModelConfig) -> float:
    """About how many weights the model has, or more."""
    moe, attention = config.moe, config.attention
    experts = 0 if moe is None else moe.num_experts * moe.intermediate_size + moe.shared_intermediate_size
    width = max(config.intermediate_size, *config.intermediate_sizes, 1) + experts
    if isinstance(attention, GQAConfig):
        heads = attention.num_heads + 2 * attention.num_kv_heads
        width += heads * max(attention.head_dim, *(size for _, size in attention.layer_heads), 1)
    elif isinstance(attention, MLAConfig):
        widest = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        width += 2 * attention.num_heads * widest + attention.kv_lora_rank + (attention.q_lora_rank or 0)
    positions = config.max_position_embeddings + (0 if config.rope is None else config.rope.dim)
    return (config.num_layers * width * 4 + 2 * config.vocab_size + positions) * float(config.hidden_size)


# ---- adapters

_LAYERS = {
    f"model.layers.{layer}.{name}": LayerShape(3, 4)
    for layer in range(2)
    for name in ("self_attn.q_proj", "mlp.shared_experts.up_proj")
}
_ADAPTER = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "use_rslora": True,
    "bias": "none",
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {r"layers\.1\..*": 8},
    "target_modules": ["q_proj"],
    "use_dora": False,
    "init_lora_weights": True,
}
_PATTERNS = ("(", "(a+)+", ".*", "x" * 100, "(?P<a>.)", "\\", "[", "q_proj|up_proj", "pissa", "olora", 10**30, -1, 1.5)


def _tensors() -> dict[str, Any]:
    header: dict[str, Any] = {}
    start = 0
    for layer in _LAYERS:
        for side, shape in (("A", [2, 3]), ("B", [4, 2])):
            stop = start + 4 * shape[0] * shape[1]
            name = f"base_model.model.{layer}.lora_{side}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
            start = stop
    return header


def make_adapter(random: Random) -> Case:
    config = _json(random, _ADAPTER, (*_VALUES, *_PATTERNS))
    header = _tensors()
    written = json.dumps(header).encode() if random.random() < 0.5 else _json(random, header, ("F16", "BF16", [2], [0]))
    data = struct.pack("<Q", len(written)) + written + bytes(56 * len(_LAYERS))
    return config, data if random.random() < 0.9 else mutate.data(random, data)


def adapter(folder: Path, case: Case) -> None:
    (folder / "adapter_config.json").write_bytes(case[0])
    (folder / "adapter_model.safetensors").write_bytes(case[1])
    read = read_adapter(folder, _LAYERS, max_rank=8)
    assert read.layers.keys() <= _LAYERS.keys()


# ---- tokenizers

_TOKENS = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the", "é".encode(), "日".encode()]
_KIMI_LINES = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(_TOKENS))
_TEKKEN = {
    "config": {
        "pattern": r"\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+",
        "default_vocab_size": 290,
        "default_num_special_tokens": 9,
    },
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(_TOKENS)
    ],
    "special_tokens": [{"rank": 0, "token_str": "<s>", "is_control": True}],
}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {"262": {"content": "<|im_end|>", "special": True}},
    "add_bos_token": True,
    "bos_token": "<s>",
    "legacy": False,
}


@cache
def _sentencepiece() -> bytes:
    made = io.BytesIO()
    sentences = iter(["the quick brown fox", "naïve café", "北京市 the", "3.14 and 12345", "don't stop"] * 4)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=made,
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return made.getvalue()


def make_tokenizer_forms(random: Random) -> Case:
    makers: dict[str, Callable[[], bytes]] = {
        find.TEKKEN: lambda: _json(random, _TEKKEN),
        find.TIKTOKEN: lambda: mutate.data(random, _KIMI_LINES),
        find.SENTENCEPIECE: lambda: mutate.data(random, _sentencepiece()),
    }
    name = random.choice(tuple(makers))
    config = json.dumps(_TOKENIZER_CONFIG).encode() if random.random() < 0.5 else _json(random, _TOKENIZER_CONFIG)
    return name.encode(), makers[name](), config


def tokenizer_forms(folder: Path, case: Case) -> None:
    name = case[0].decode(errors="replace")
    if name not in find.OTHER_FORMS or len(case) < 3:
        return
    for other in find.OTHER_FORMS:
        (folder / other).unlink(missing_ok=True)
    (folder / name).write_bytes(case[1])
    (folder / "tokenizer_config.json").write_bytes(case[2])
    kept = folder / "kept"
    with patch.object(find, "cache_places", lambda kind: iter([kept])):
        try:
            read = TextTokenizer(folder)
            ids = read.encode("the quick brown fox, naïve 日本 <s>")
            read.decode(ids)
        finally:
            for file in kept.glob("*.json"):
                file.unlink()


# ---- GGUF


@cache
def _gguf() -> tuple[bytes, ...]:
    """Small models of two families, each with tokenizer and weights."""
    made = []
    for name, kind in (("llama", GGMLQuantizationType.Q8_0), ("gemma3", GGMLQuantizationType.F16)):
        changed = {"intermediate_size": 64, "head_dim": 16}
        with TemporaryDirectory() as folder:
            original = tiny.save_tiny(name, Path(folder), changed=changed)
            made.append(write_gguf(Path(folder) / "m.gguf", original, type_of=kind).read_bytes())
    return tuple(made)


def make_gguf(random: Random) -> Case:
    data = random.choice(_gguf())
    if random.random() < 0.5:  # the header, where most of the bytes have a meaning
        return (mutate.data(random, data[:4096]) + data[4096:],)
    return (mutate.data(random, data),)


def gguf_file(folder: Path, case: Case) -> None:
    (folder / "m.gguf").write_bytes(case[0])
    kept = folder / "kept"
    with patch.object(find, "cache_places", lambda kind: iter([kept])):
        try:
            directory = model_directory(folder / "m.gguf")
            TextTokenizer(directory).encode("the quick brown fox, naïve 日本 <s>")
            config = read_config(directory)
            if _numbers(config) <= _NUMBERS_MAX:
                load_model(directory, config, backend=backend_for(config), dtype="float32", device="cpu")
        finally:
            shutil.rmtree(kept, ignore_errors=True)


_TARGETS = (
    (make_families, families),
    (make_quantization, quantization),
    (make_adapter, adapter),
    (make_tokenizer_forms, tokenizer_forms),
    (make_gguf, gguf_file),
)


@contextmanager
def model_file_targets() -> Iterator[Targets]:
    with in_folders(_TARGETS) as targets:
        yield targets
