"""Targets: the files of a checkpoint, and addresses."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from baton.gateway.fleet.discovery.sources import parse_places
from baton.gateway.text.model import read_bos_token_id, read_default_sampling
from baton.gateway.text.tokenizer import TextTokenizer
from baton.models.checkpoint.checkpoint import read_checkpoint
from baton.models.families.reader import read_config
from baton.models.loading.identity import config_digest
from baton.models.loading.needs import kv_cache_spec
from baton.rpc.server import ListenAddress, check_advertised
from tests.fuzz import mutate
from tests.fuzz.folders import in_folders
from tests.fuzz.target import Case, Targets
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
_HOSTS = (
    "127.0.0.1:7000",
    "[::1]:0",
    "gateway.example.org:65535",
    "a,b:1,c:2",
    "0.0.0.0:1",
    "k8s://ns/a:grpc",
    "file:///a",
)


def _json(random: Random, sample: object) -> bytes:
    """The sample's JSON, changed as values or as bytes."""
    if random.random() < 0.2:
        return mutate.data(random, json.dumps(sample).encode())
    return json.dumps(mutate.json_value(random, sample, _OTHERS)).encode()


def make_config(random: Random) -> Case:
    parts = [_json(random, random.choice(_CONFIGS))]
    return (*parts, _json(random, _GENERATION)) if random.random() < 0.3 else tuple(parts)


def config(folder: Path, case: Case) -> None:
    (folder / "config.json").write_bytes(case[0])
    generation = folder / "generation_config.json"
    generation.unlink(missing_ok=True)
    if len(case) > 1:
        generation.write_bytes(case[1])
    read = read_config(folder)
    config_digest(read)
    kv_cache_spec(read, "float32", "")
    read_default_sampling(folder)
    read_bos_token_id(folder)


def make_safetensors(random: Random) -> Case:
    header = _json(random, _HEADER)
    length = len(header) if random.random() < 0.9 else abs(mutate.number(random)) % 2**64
    data = struct.pack("<Q", length) + header + bytes(32)
    return (data if random.random() < 0.8 else mutate.data(random, data),)


def safetensors(folder: Path, case: Case) -> None:
    (folder / "model.safetensors").write_bytes(case[0])
    for tensor in read_checkpoint(folder).values():
        assert 0 < tensor.start <= tensor.stop <= len(case[0]) + 10_000


def make_index(random: Random) -> Case:
    return (_json(random, _INDEX),)


def index(folder: Path, case: Case) -> None:
    one = folder / "one.safetensors"
    if not one.exists():
        header = json.dumps(_HEADER).encode()
        one.write_bytes(struct.pack("<Q", len(header)) + header + bytes(32))
    (folder / "model.safetensors.index.json").write_bytes(case[0])
    read_checkpoint(folder)


_TOKENIZERS = [json.loads(make().to_str()) for make in (byte_level, byte_fallback)]


def make_tokenizer(random: Random) -> Case:
    return (_json(random, random.choice(_TOKENIZERS)),)


def tokenizer(folder: Path, case: Case) -> None:
    (folder / "tokenizer.json").write_bytes(case[0])
    read = TextTokenizer(folder)
    read.check_vocabulary(320)
    ids = read.encode("the quick brown fox, naïve 日本 <eos>")
    read.decode(ids)
    detokenizer = read.detokenizer(ids[:2])
    detokenizer.push(*ids)
    detokenizer.finish()


def make_addresses(random: Random) -> Case:
    return (mutate.text(random, random.choice(_HOSTS)).encode(errors="surrogatepass"),)


def addresses(folder: Path, case: Case) -> None:
    del folder
    given = case[0].decode(errors="surrogateescape")
    parse_places(given, field="decode")
    check_advertised(given)
    where = ListenAddress.parse(given, field="listen")
    assert where.host
    assert 0 <= where.port <= 65535


_FILE_TARGETS = (
    (make_config, config),
    (make_safetensors, safetensors),
    (make_index, index),
    (make_tokenizer, tokenizer),
    (make_addresses, addresses),
)


@contextmanager
def file_targets() -> Iterator[Targets]:
    with in_folders(_FILE_TARGETS) as targets:
        yield targets
