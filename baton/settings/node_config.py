"""The settings of nodes, with their defaults, bounds and meanings.
`baton.settings.config` has the tree of all settings.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from baton.core.limits import (
    COUNT_MAX,
    KEEPALIVE_S,
    RATE_MAX,
    RATE_MIN,
    SIZE_MIB_MIN,
    TOKENS_MAX,
)
from baton.core.plugins import TRANSPORTS, plugin_names
from baton.settings.adapter_list import read_adapters
from baton.settings.config import MIB, CommonSettings, check_printable, listed
from baton.settings.internal import internal
from baton.settings.topology import read_topology

GIGA = 1e9
GIB = 1 << 30
# Defaults that depend on the device.
CPU_CACHE_MIB = 128
CPU_CACHE_SHARE = 0.25  # of the memory of machine or container, for the caches of one node's ranks
CPU_BATCH_TOKENS = 256
CPU_BATCH_REQUESTS = 64
# Requests of a step on nodes that decode, the smaller number if the cache is too small for more; and on nodes that only
# compute prompts, where requests leave with their first token, so steps hold few of them.
GPU_BATCH_REQUESTS, SMALL_GPU_BATCH_REQUESTS, GPU_PREFILL_REQUESTS = 512, 256, 128
STAGING_SLOTS = 4  # staging buffers for each direction
LEADER_PORT = 7004  # of a leader whose environment names no port
_TRANSPORTS = ("ucx", "loopback")  # `kvtransfer.transports.table` has their rows
_CPU_SEGMENT_MIB, _GPU_SEGMENT_MIB = 4.0, 256.0
_CONVERTIBLE = ("float32", "bfloat16", "float16")
# Limits that no machine reaches, as those of `baton.core.limits`.
_THREADS_MAX = _ADAPTERS_MAX = 1024
_EXPERTS_MAX = 1 << 16
_ADAPTERS = 8  # slots if adapters are wanted and no number is given
_SEATS_MAX = 1 << 16
_CACHE_MIB_MAX = 1 << 26
_HOST_CACHE_GIB_MAX = float(1 << 16)
_FILE_CACHE_GIB_MIN, _FILE_CACHE_GIB_MAX = 0.001, float(1 << 20)
_WAITING = 256  # as all measurements of overload had it


class NodeSettings(CommonSettings):
    """Settings of both node roles."""

    model_revision: str | None = Field(
        None,
        min_length=1,
        max_length=128,
        description="name of the weights' revision in status, metrics and receipts; not compared: nodes work together "
        "if their weights are equal; default: the commit, for a model of the hub, else none",
    )
    kv_cache_layout: str | None = Field(
        None, description="order of the cache's axes: NHD, HND, BLNHC, BLHNC; MLA: LBNC, BLNC"
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="dtype of the cache; auto: that of dtype; fp8 uses the checkpoint's k_scale and v_scale, "
        "or 1 without them; fp8_e5m2 is refused for checkpoints in fp8",
    )
    block_size: int = Field(16, ge=1, le=1024, description="token slots per block")
    kv_cache_mib: int | None = Field(
        None,
        ge=1,
        le=_CACHE_MIB_MAX,
        description="memory for the cache; default: on a CPU what one request of the "
        f"longest context needs, at least {CPU_CACHE_MIB} and at most a quarter of the memory of machine or container; "
        "on a GPU, what is left of gpu_memory_fraction",
    )
    gpu_memory_fraction: float = Field(
        0.9,
        ge=0.01,
        le=1,
        description="share of the GPU's memory that this node may use; a profile at start sizes the cache",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of weights and activations; auto: float32 on a CPU, on a GPU that of the checkpoint"
    )
    device: str = Field(
        "auto", description="device of weights and cache: cpu, cuda, cuda:1; auto: a GPU if there is one, else the CPU"
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=64,
        description="ranks that share the model; each is a process with part of the weights and KV; on GPUs, each rank "
        "has its own GPU, counted from --device",
    )
    expert_parallel: bool = Field(
        False,
        description="give each rank whole experts of a mixture instead of some channels of all; the rest of the model "
        "is split as before",
    )
    attention_data_parallel: bool = Field(
        False,
        description="for models with latent attention (DeepSeek, Kimi-K2, GLM-5): each rank computes the attention of "
        "its own requests with whole attention weights and holds only their KV, so that the node's room for KV grows "
        "with its ranks; together with expert_parallel (elsewhere called enable_dp_attention)",
    )
    redundant_experts: int = Field(
        0,
        ge=0,
        le=_EXPERTS_MAX,
        description="copies of experts in each layer, divided over the ranks with the experts themselves, so that "
        "ranks get equally many tokens (elsewhere num_redundant_experts, ep_num_redundant_experts). Needs "
        "expert_parallel",
    )
    expert_load: Path | None = Field(
        None,
        description="file of `baton expert-load`, whose token counts decide which experts are copied and where they "
        "are placed; the same file on every host of the node. Default: all experts count alike. Needs expert_parallel",
    )
    threads: int = Field(1, ge=1, le=_THREADS_MAX, description="CPU threads of one engine step, in each rank")
    load_format: Literal["safetensors", "dummy"] = Field(
        "safetensors", description="dummy: random weights, for tests and benchmarks"
    )
    attention_backend: str | None = Field(
        None, description="name of the attention backend to use; default: the first one that fits"
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=1,
        le=COUNT_MAX,
        description="maximum tokens in one engine step; longer prompts are split into chunks; default: "
        f"{CPU_BATCH_TOKENS} on a CPU; on a GPU, by a profile at start, the smallest fast size whose steps take at "
        "most 150 ms on a prefill node, and 50 ms next to 32 decodes on a decode node",
    )
    max_batch_requests: int | None = Field(
        None,
        ge=1,
        le=_SEATS_MAX,
        description=f"maximum requests in one engine step; default: {CPU_BATCH_REQUESTS} on a CPU; on a GPU, "
        f"{GPU_BATCH_REQUESTS}, or {SMALL_GPU_BATCH_REQUESTS} with a small cache, or {GPU_PREFILL_REQUESTS} on a "
        "prefill node that only computes prompts",
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture steps as CUDA graphs")
    batch_invariant: bool = Field(False, description="make logits bit-identical alone and in any batch; slower")
    speculation: Literal["off", "text", "auto", "always"] = Field(
        "auto",
        description="propose draft tokens and verify several of them in one step, where measured step times say that "
        "this is faster; no token changes. text: drafts from the request's own text, its tenant's recent answers and "
        "its grammar; auto: also from the checkpoint's layer for multi-token prediction, if it has one that fits, or "
        "from draft_head; always: as auto, wherever there is anything to draft",
    )
    draft_head: Path | None = Field(
        None,
        description="directory of an EAGLE-3 head for the model, which proposes draft tokens in place of the "
        "checkpoint's own layer; the same on prefill and decode nodes. Needs speculation auto or always",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        le=TOKENS_MAX,
        description="longest prompt plus output; default: the model's limit. With LongRoPE, a number above the model's "
        "original context must be given to every node and gateway",
    )
    prefix_cache: bool = Field(True, description="reuse the KV of prefixes shared with earlier requests")
    host_cache_gib: float = Field(
        0.0,
        ge=0,
        le=_HOST_CACHE_GIB_MAX,
        description="host memory in which each rank keeps a copy of the KV that it computes or receives, for prefixes "
        "that the cache no longer has; on a GPU it is page-locked; 0: none. Needs prefix_cache",
    )
    file_cache_dir: Path | None = Field(
        None,
        description="directory in which KV is also kept, so that it survives a restart of the node; several nodes of "
        "one host may share it; whoever can write there can change what requests read. Needs host_cache_gib",
    )
    file_cache_gib: float = Field(
        16.0,
        ge=_FILE_CACHE_GIB_MIN,
        le=_FILE_CACHE_GIB_MAX,
        description="maximum disk space that this node's files in file_cache_dir may take, for each rank",
    )
    kv_store: str | None = Field(
        None,
        description="address of a store that keeps KV for all nodes of a cluster, such as mooncake://HOST:50051, the "
        "master of a Mooncake Store; whoever can write there can change what requests read. Needs host_cache_gib",
    )
    adapter: str = Field(
        "",
        description="LoRA adapters, comma-separated; the flag may be given several times. name=directory: loaded at "
        "start, as PEFT saves it. One directory without a name is watched: each directory in it with an "
        "adapter_config.json is loaded as an adapter of its name, and unloaded when it is removed. Clients name an "
        "adapter as their model",
    )
    max_adapters: int | None = Field(
        None,
        ge=0,
        le=_ADAPTERS_MAX,
        description="adapters that the node can hold at once; their memory is allocated at start; with adapter the "
        "default is 8, or the number of adapters if that is more; else 0",
    )
    max_adapter_rank: int = Field(
        16, ge=1, le=256, description="largest rank of an adapter; every adapter takes the memory of this rank"
    )
    transport: str = Field(
        "ucx",
        description="transport for KV: ucx; loopback, only inside one process; or the name of a plug-in",
    )
    segment_mib: float | None = Field(
        None,
        ge=SIZE_MIB_MIN,
        le=1024,
        description="largest KV message; each transfer chooses its size up to that from the link's measured speed; "
        f"default: {_CPU_SEGMENT_MIB:g} on a CPU, {_GPU_SEGMENT_MIB:g} on a GPU",
    )
    link_floor_gb_per_s: float = Field(
        0.0,
        ge=0,
        le=RATE_MAX,
        description="minimum speed of the link to a peer, in GB/s as measured when the pair connects; a pair with a "
        "slower link is refused; 0: any link",
    )
    topology: str = Field(
        "",
        description="where the node is, as labels from the widest group to the narrowest, such as zone=a,host=h1; in a "
        "large cluster, nodes are paired first with nodes whose leading labels are equal",
    )

    num_hosts: int = internal(1, "hosts that share the node's ranks in equal numbers", ge=1, le=64)
    host_rank: int = internal(0, "number of this host; host 0 leads and serves, the others only compute", ge=0, le=63)
    leader_address: str | None = internal(None, "host:port where host 0 waits for the ranks of the other hosts")
    num_blocks: int | None = internal(None, "blocks in the cache; None: as many as its memory holds")
    state_slots: int = internal(
        0,
        "recurrent states in the cache; 0: three for each request of a step, in at most half of the cache's memory",
    )
    adapter_experts: bool = internal(
        False, "adapters have room for routed experts, as those need that the node finds when it starts"
    )
    max_waiting: int = internal(_WAITING, "most requests that wait for room; further ones are refused")
    keepalive_s: float = internal(KEEPALIVE_S, "a peer that answers no ping for that long counts as lost")

    @field_validator("transport")
    @classmethod
    def _is_transport(cls, name: str) -> str:
        if name not in _TRANSPORTS and name not in (more := plugin_names(TRANSPORTS, _TRANSPORTS)):
            raise ValueError(f"{name!r} is not a transport; allowed: {', '.join((*_TRANSPORTS, *more))}")
        return name

    @field_validator("model_revision")
    @classmethod
    def _is_revision(cls, name: str | None) -> str | None:
        return check_printable(name)

    @field_validator("adapter")
    @classmethod
    def _are_adapters(cls, given: str) -> str:
        read_adapters(given)
        return given

    @field_validator("topology")
    @classmethod
    def _is_topology(cls, given: str) -> str:
        read_topology(given)
        return given

    @property
    def topology_labels(self) -> tuple[str, ...]:
        return read_topology(self.topology)

    @property
    def adapters(self) -> dict[str, Path]:
        """Directories of the adapters to load at start, by name."""
        return read_adapters(self.adapter).named

    @property
    def watched_adapters(self) -> Path | None:
        """The directory whose adapters are loaded and unloaded as they come and go."""
        return read_adapters(self.adapter).watched

    @property
    def adapter_slots(self) -> int:
        """Adapters that the node can hold."""
        if self.max_adapters is not None:
            return self.max_adapters
        return max(_ADAPTERS, len(self.adapters)) if self.adapter else 0

    @property
    def ranks_per_host(self) -> int:
        return self.tensor_parallel_size // self.num_hosts

    def segment_bytes(self, *, on_gpu: bool) -> int:
        mib = self.segment_mib or (_GPU_SEGMENT_MIB if on_gpu else _CPU_SEGMENT_MIB)
        return int(mib * MIB)

    def staging_bytes(self, *, on_gpu: bool) -> int:
        """Staging memory of both directions together."""
        return 2 * STAGING_SLOTS * self.segment_bytes(on_gpu=on_gpu)

    @property
    def receive_bytes_per_s(self) -> float | None:
        """Limit of received KV. Returns None if there is no limit."""
        return None

    @property
    def converted_kv_dtypes(self) -> tuple[str, ...]:
        """Cache dtypes of other nodes that this node accepts although its own differs."""
        return ()

    @property
    def decodes(self) -> bool:
        """Whether requests decode on this node."""
        return True

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_mib is None else self.kv_cache_mib * MIB

    @property
    def host_cache_bytes(self) -> int:
        """Host memory of each rank for KV outside of the cache; 0: none."""
        return int(self.host_cache_gib * GIB) if self.prefix_cache else 0

    @property
    def file_cache_bytes(self) -> int:
        return int(self.file_cache_gib * GIB)


class PrefillSettings(NodeSettings):
    """Settings of a prefill node."""

    also_decodes: bool = Field(
        True,
        description="serve whole requests too, prompt and decode, which gateways send when the decode nodes have no "
        "room for them; false: this node computes prompts only",
    )

    connect_timeout_s: float = internal(10.0, "time limit for connecting a pair with a decode node")
    overlap_layers: bool = internal(
        True,
        "send the KV of a chunk's first layers while later layers compute, in as many groups as suit the measured link",
    )

    @property
    def decodes(self) -> bool:
        return self.also_decodes


class DecodeSettings(NodeSettings):
    """Settings of a decode node."""

    receive_limit_gb_per_s: float | None = Field(
        None,
        ge=RATE_MIN,
        le=RATE_MAX,
        description="maximum rate of KV received from all prefill nodes together, in GB/s; senders wait; default: no "
        "limit",
    )
    kv_convert_from: str = Field(
        "",
        description="cache dtypes of prefill nodes that this node accepts although its own differs, comma-separated: "
        "float32, bfloat16, float16; the prefill nodes convert; default: such nodes are refused",
    )

    local_prefill_tokens: int | None = internal(
        None,
        "the decode node prefills a prompt with fewer uncached tokens itself; None: as many as cost its streams almost "
        "nothing, by measured step costs",
    )
    lease_s: float = internal(300.0, "how long blocks stay reserved for KV that has not arrived")

    @property
    def receive_bytes_per_s(self) -> float | None:
        limit = self.receive_limit_gb_per_s
        return None if limit is None else limit * GIGA

    @property
    def converted_kv_dtypes(self) -> tuple[str, ...]:
        return listed(self.kv_convert_from)

    @field_validator("kv_convert_from")
    @classmethod
    def _are_convertible(cls, names: str) -> str:
        if unknown := set(listed(names)) - set(_CONVERTIBLE):
            raise ValueError(f"{', '.join(sorted(unknown))} cannot be converted; allowed: {', '.join(_CONVERTIBLE)}")
        return names
