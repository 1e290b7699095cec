"""Targets: the files of a checkpoint, and settings."""

import contextlib
import io
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from baton.config import DecodeSettings, GatewaySettings, PrefillSettings, read_settings, variable
from baton.errors import ConfigError, InternalError
from baton.rpc.server import Address, check_advertised
from gateway.chat.model import read_chat_model
from gateway.chat.types import ChatRequest
from gateway.discovery import parse_addresses
from gateway.generation_defaults import read_bos_token_id, read_default_sampling
from gateway.tokenizer import TextTokenizer
from models.config.reader import read_config
from models.identity import config_digest
from models.needs import kv_cache_spec
from models.weights.checkpoint import read_checkpoint
from tests.fuzz import mutate
from tests.fuzz.target import Parse
from tests.integration.chatting import TEMPLATE
from tests.unit.gateway.tokenizers import byte_fallback, byte_level
from tests.unit.models import test_config, test_published_configs

_CONFIGS: tuple[dict[str, Any], ...] = (
    *(value for value in vars(test_config).values() if isinstance(value, dict) and "architectures" in value),
    *(value for value in vars(test_published_configs).values() if isinstance(value, dict) and "architectures" in value),
)
_OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 10**9, 2**31, 2**63, 10**30, 0.0, 0.5, -1.5, 1e308, "", "x", "yarn", "llama3"),
    *([], {}, [1], ["x"], {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 0}, "float8_e4m3fn"),
    {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
)
_GENERATION = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [1, 2], "bos_token_id": 1, "min_p": 0.1}
_ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
_HEADER = {
    "__metadata__": {"format": "pt"},
    "a": _ENTRY,
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
_INDEX = {"metadata": {"total_size": 32}, "weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}
_SPECIAL = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": TEMPLATE, "pad_token": None}
_CHAT = ChatRequest(messages=({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}))
_HOSTS = ("127.0.0.1:7000", "[::1]:0", "gateway.example.org:65535", "a,b:1,c:2", "0.0.0.0:1")


def _json(random: Random, sample: object) -> bytes:
    """The sample's JSON, changed as values or as bytes."""
    if random.random() < 0.2:
        return mutate.data(random, json.dumps(sample).encode())
    return json.dumps(mutate.json_value(random, sample, _OTHERS)).encode()


def config(folder: Path, random: Random) -> None:
    (folder / "config.json").write_bytes(_json(random, random.choice(_CONFIGS)))
    generation = folder / "generation_config.json"
    generation.unlink(missing_ok=True)
    if random.random() < 0.3:
        generation.write_bytes(_json(random, _GENERATION))
    read = read_config(folder)
    config_digest(read)
    kv_cache_spec(read, "float32", "")
    read_default_sampling(folder)
    read_bos_token_id(folder)


def safetensors(folder: Path, random: Random) -> None:
    header = _json(random, _HEADER)
    length = len(header) if random.random() < 0.9 else abs(mutate.number(random)) % 2**64
    data = struct.pack("<Q", length) + header + bytes(32)
    (folder / "model.safetensors").write_bytes(data if random.random() < 0.8 else mutate.data(random, data))
    for tensor in read_checkpoint(folder).values():
        assert 0 < tensor.start <= tensor.stop <= len(data) + 10_000


def index(folder: Path, random: Random) -> None:
    header = json.dumps(_HEADER).encode()
    (folder / "one.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    (folder / "model.safetensors.index.json").write_bytes(_json(random, _INDEX))
    read_checkpoint(folder)


_TOKENIZERS = [json.loads(make().to_str()) for make in (byte_level, byte_fallback)]


def tokenizer(folder: Path, random: Random) -> None:
    (folder / "tokenizer.json").write_bytes(_json(random, random.choice(_TOKENIZERS)))
    read = TextTokenizer(folder)
    read.check_vocabulary(320)
    ids = read.encode("the quick brown fox, naïve 日本 <eos>")
    read.decode(ids)
    detokenizer = read.detokenizer(ids[:2])
    detokenizer.push(*ids)
    detokenizer.finish()


def chat_template(folder: Path, random: Random) -> None:
    (folder / "tokenizer_config.json").write_bytes(_json(random, _SPECIAL))
    model = read_chat_model(folder, None)
    model.prepare(_CHAT)


def settings(folder: Path, random: Random) -> None:
    del folder
    cls = random.choice((PrefillSettings, DecodeSettings, GatewaySettings))
    names = random.sample(sorted(cls.model_fields), random.choice((1, 2, 3)))
    values = {
        name: random.choice(
            (str(mutate.number(random)), mutate.text(random, "auto"), mutate.text(random, "127.0.0.1:1"))
        )
        for name in names
    }
    clean = {name: value.replace("\0", "") for name, value in values.items()}
    variables = {variable(name): value.encode(errors="replace").decode() for name, value in clean.items()}
    if random.random() < 0.2:
        variables["BATON_" + mutate.text(random, "BLOCK_SIZE").replace("\0", "").replace("=", "")] = "1"
    flags = [] if random.random() < 0.5 else [f"--{name.replace('_', '-')}={value}" for name, value in clean.items()]
    error = io.StringIO()
    with patch.dict("os.environ", {} if flags else variables), contextlib.redirect_stderr(error):
        try:
            read_settings(cls, "node", flags)
        except SystemExit as ended:
            lines = error.getvalue()
            if ended.code != 2 or not lines or len(lines) > 10_000 or "Traceback" in lines:
                raise InternalError(f"exit code {ended.code}: {lines[:500]}") from None
            raise ConfigError("a setting is wrong") from None


def addresses(folder: Path, random: Random) -> None:
    del folder
    given = mutate.text(random, random.choice(_HOSTS))
    parse_addresses(given, field="decode")
    check_advertised(given)
    where = Address.parse(given, field="listen")
    assert where.host
    assert 0 <= where.port <= 65535


@contextmanager
def file_targets() -> Iterator[Mapping[str, Parse]]:
    """Each target with a folder of its own, in memory where that is possible."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as base:
        targets: dict[str, Parse] = {}
        for parse in (config, safetensors, index, tokenizer, chat_template, settings, addresses):
            folder = Path(base) / parse.__name__
            folder.mkdir()
            targets[parse.__name__] = _bound(parse, folder)
        yield targets


def _bound(parse: Any, folder: Path) -> Parse:
    def run(random: Random) -> None:
        parse(folder, random)

    return run
