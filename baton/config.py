"""Every setting of every process, and the only reader of the environment. Knows neither torch nor grpc.

    CommonSettings
    ├── NodeSettings             model, cache, engine, transfer
    │   ├── PrefillSettings
    │   └── DecodeSettings
    └── GatewaySettings

A setting has one name: `--block-size 32` and `BATON_BLOCK_SIZE=32` are the same, and the flag wins. A wrong value is
one line on stderr that names the setting, the value and what is allowed; exit code 2.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton.errors import ConfigError
from baton.types import LocalPolicy

DEMO_MODELS = Path(__file__).resolve().parent.parent / "models" / "demo"
MIB = 1 << 20
GIGA = 1e9
_CPU_SEGMENT_MIB, _GPU_SEGMENT_MIB = 4.0, 256.0
_CONVERTIBLE = ("float32", "bfloat16", "float16")

Settings = TypeVar("Settings", bound="CommonSettings")


class CommonSettings(BaseSettings):
    """What all processes share."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_", frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    listen: str = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 takes a free one")
    advertise: str | None = Field(
        None,
        description="host:port under which others reach it; default: the one it listens on, 127.0.0.1 where that is "
        "0.0.0.0",
    )
    name: str | None = Field(None, description="name in receipts, logs and status; default: role and address")
    model: Path = Field(DEMO_MODELS / "llama", description="directory with config.json, weights and tokenizer.json")
    drain_grace_s: float = Field(30.0, gt=0, description="on SIGTERM, how long running requests may take to finish")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what goes to stderr")
    ready_file: Path | None = Field(None, description="a JSON line with address and pid is written here when ready")


class NodeSettings(CommonSettings):
    """What both node roles share."""

    kv_cache_layout: str | None = Field(
        None, description="order of the cache's axes: NHD, HND, BLNHC, BLHNC; MLA: LBNC, BLNC"
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="of the cache; auto: as dtype; fp8 takes the checkpoint's k_scale and v_scale, else 1"
    )
    block_size: int = Field(16, ge=1, le=1024, description="token slots per block")
    num_blocks: int | None = Field(None, ge=1, description="blocks in the cache; default: from kv_cache_mib")
    kv_cache_mib: int | None = Field(
        None,
        ge=1,
        description="memory for the cache when num_blocks is not given; default: 128 on a CPU, on a GPU what "
        "gpu_memory_fraction leaves",
    )
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=1, description="of the GPU's memory, what this node may fill; a profile at start sizes the cache"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and activations; auto: float32 on a CPU, else the checkpoint's"
    )
    device: str = Field(
        "auto", description="of weights and cache: cpu, cuda, cuda:1; auto: a GPU where there is one, else the CPU"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks that compute the model together, each a process with a share of weights and KV, and on GPUs "
        "with a GPU of its own, from --device on",
    )
    threads: int = Field(1, ge=1, description="CPU threads of one engine step, in each rank")
    load_format: Literal["safetensors", "dummy"] = Field("safetensors", description="dummy: random weights, for tests")
    attention_backend: str | None = Field(None, description="forces one attention backend by name")
    max_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of one engine step: the budget that prefill is cut to; default: 256 on a CPU, on a GPU the "
        "smallest size that a profile at start shows to be fast",
    )
    max_batch_requests: int | None = Field(
        None, ge=1, description="requests of one engine step; default: 64 on a CPU, 256 on a GPU"
    )
    cuda_graphs: bool = Field(True, description="capture decode steps as CUDA graphs; on a GPU")
    batch_invariant: bool = Field(
        False, description="logits are bit-equal whatever else is in the batch; slower, see the README"
    )
    max_waiting: int = Field(256, ge=0, description="requests that may wait for room; more are refused")
    max_context_tokens: int | None = Field(None, ge=1, description="longest prompt plus output; default: the model's")
    prefix_cache: bool = Field(True, description="reuse the KV of equal prompt beginnings")
    transport: Literal["ucx", "loopback"] = Field("ucx", description="what carries KV; loopback: within one process")
    segment_mib: float | None = Field(
        None,
        gt=0,
        le=1024,
        description="largest message of KV, within which each job's is chosen from what the link was measured to do; "
        "default: 4 on a CPU, 256 on a GPU",
    )
    staging_slots: int = Field(4, ge=2, description="staging buffers of segment_mib, for each direction")
    link_floor_gb_per_s: float = Field(
        0.0,
        ge=0,
        description="slowest link to a peer that will do, in GB/s as measured when the pair is made; below it the pair "
        "is refused; 0: any",
    )
    digests: bool = Field(True, description="check every segment's digest before it is scattered")
    keepalive_s: float = Field(10.0, gt=0, le=3600, description="a peer that answers no ping for that long is dead")

    def segment_bytes(self, *, on_gpu: bool) -> int:
        mib = self.segment_mib or (_GPU_SEGMENT_MIB if on_gpu else _CPU_SEGMENT_MIB)
        return int(mib * MIB)

    def staging_bytes(self, *, on_gpu: bool) -> int:
        """Of both directions together."""
        return 2 * self.staging_slots * self.segment_bytes(on_gpu=on_gpu)

    @property
    def receive_bytes_per_s(self) -> float | None:
        """How much KV to receive; None for as much as comes."""
        return None

    @property
    def converted_kv_dtypes(self) -> tuple[str, ...]:
        """Of other nodes' caches, that this node takes in its own dtype."""
        return ()

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_mib is None else self.kv_cache_mib * MIB


class PrefillSettings(NodeSettings):
    """Role prefill."""

    connect_timeout_s: float = Field(10.0, gt=0, description="for making the pair with a decode node")
    layer_groups: bool = Field(
        True,
        description="send the KV of a chunk's first layers while later ones compute, in as many groups as the measured "
        "link suggests; off: once the chunk is computed",
    )


class DecodeSettings(NodeSettings):
    """Role decode."""

    local_prefill_tokens: int = Field(
        32, ge=0, description="a prompt with fewer uncached tokens is prefilled on the decode node itself"
    )
    receive_limit_gb_per_s: float | None = Field(
        None, gt=0, description="most KV to take from all prefill nodes together, in GB/s; more waits at the senders"
    )
    kv_convert_from: str = Field(
        "",
        description="dtypes of prefill nodes' caches that this node takes in its own dtype, of float32, bfloat16 and "
        "float16, comma-separated; they convert before they send. Without it they are refused",
    )
    lease_s: float = Field(300.0, gt=0, description="how long blocks are held for KV that is on its way")

    @property
    def receive_bytes_per_s(self) -> float | None:
        limit = self.receive_limit_gb_per_s
        return None if limit is None else limit * GIGA

    @property
    def converted_kv_dtypes(self) -> tuple[str, ...]:
        return _listed(self.kv_convert_from)

    @field_validator("kv_convert_from")
    @classmethod
    def _are_convertible(cls, names: str) -> str:
        if unknown := set(_listed(names)) - set(_CONVERTIBLE):
            raise ValueError(f"{', '.join(sorted(unknown))} cannot be converted; allowed: {', '.join(_CONVERTIBLE)}")
        return names


class GatewaySettings(CommonSettings):
    """Role gateway."""

    prefill: str = Field("", description="prefill nodes, host:port, comma-separated; names are re-resolved")
    decode: str = Field("", description="decode nodes, likewise")
    local_policy: LocalPolicy = Field(
        LocalPolicy.PREFER,
        description="strict: never prefill on a decode node; prefer: short prompts and when no prefill node can; "
        "local: always",
    )
    model_name: str | None = Field(None, description="name that clients use; default: the model directory's name")
    resolve_s: float = Field(5.0, gt=0, description="how often names of nodes are resolved again")
    link_retry_s: float = Field(
        60.0, gt=0, description="how often a pair that was refused for its slow link is measured again"
    )
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of a request whose client sets none")
    queue_s: float = Field(10.0, ge=0, description="how long a request may wait for room on a decode node")
    prefill_stall_s: float = Field(10.0, gt=0, description="a prefill without a sign of life for that long is redone")
    decode_stall_s: float = Field(30.0, gt=0, description="a decode node without a sign of life for that long is lost")
    max_attempts: int = Field(3, ge=1, description="prefill attempts per request, the last one on the decode node")
    max_concurrent_requests: int = Field(1024, ge=1, description="more are refused with a retry hint")


def read_settings(cls: type[Settings], program: str, argv: list[str] | None = None) -> Settings:
    """The settings of one process from flags and environment; ends the process with exit code 2 on a wrong value."""
    flags = _parser(cls, program).parse_args(argv)
    given = {name: value for name, value in vars(flags).items() if value is not None}
    try:
        return cls(**given)
    except ValidationError as error:
        for line in describe_validation_error(cls, error):
            print(f"{program}: {line}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None


def fail(program: str, error: ConfigError) -> NoReturn:
    """Ends the process over a setting that only turned out wrong later: one line, exit code 2."""
    print(f"{program}: {error}", file=sys.stderr)  # noqa: T201
    raise SystemExit(2)


def describe_validation_error(cls: type[CommonSettings], error: ValidationError) -> list[str]:
    """One line per wrong value: its variable and flag, the value, what is allowed."""
    lines = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "?"
        known = cls.model_fields.get(name)
        where = f"{variable(name)} ({flag(name)})" if known else variable(name)
        said = item["msg"][:1].lower() + item["msg"][1:]
        lines.append(f"{where} is {item['input']!r}; {said}")
    return lines


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment for a child, with some variables added."""
    return {**os.environ, **more}


def use_loopback_for_gloo() -> None:
    """Ranks of this process's group talk over the loopback, unless the environment says otherwise: gloo takes the
    address of the host's name by default, which a container may be unable to resolve."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def visible_gpus() -> int:
    """How many GPUs a process started here would see."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def ranks_of_each_node() -> int:
    """How many ranks the environment gives to nodes that are started here; 1 where it says nothing sensible, of which
    they complain themselves."""
    said = os.environ.get(variable("tensor_parallel_size"), "")
    return max(1, int(said)) if said.isdecimal() else 1


def is_set(name: str) -> bool:
    """Whether the environment sets a setting."""
    return variable(name) in os.environ


def variable(name: str) -> str:
    return f"BATON_{name.upper()}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings_table(cls: type[CommonSettings]) -> list[tuple[str, str, str, str]]:
    """Rows of flag, variable, default, meaning; the README's configuration table is made from these."""
    rows = []
    for name, info in cls.model_fields.items():
        default = info.default
        shown = "" if default is None else "models/demo/llama" if name == "model" else str(default)
        rows.append((flag(name), variable(name), shown, info.description or ""))
    return rows


def _listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _parser(cls: type[CommonSettings], program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=f"{cls.__doc__} Every flag is also a variable: --block-size is BATON_BLOCK_SIZE."
    )
    for name, info in cls.model_fields.items():
        default = "" if info.default is None else f" (default: {info.default})"
        help_text = f"{info.description}{default}".replace("%", "%%")
        parser.add_argument(flag(name), dest=name, default=None, metavar="VALUE", help=help_text)
    return parser
