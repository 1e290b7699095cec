"""Gets the costs of nodes from a live node, from a file, or by the roofline of a GPU."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.core.costs import StepCosts
from baton.core.errors import ConfigError
from baton.core.regular_file import read_regular_file
from baton.planner.drafts import measured_drafts
from baton.planner.memory import rank_memory
from baton.planner.model_size import ModelSize
from baton.planner.plan import NodeKind
from baton.planner.roofline import LEAST_SLOTS, SEATS, Gpu, cache_tokens, kv_holders, roofline, state_slots
from baton.protos.v1 import node_status_pb2
from baton.rpc.convert_node import costs_from_proto, kept_bytes
from baton.rpc.describe import describe

_RANKS_MAX = 16
_FILE_BYTES_MAX = 1 << 20
# The cache of a node holds the longest request, and at least this many mean ones.
_REQUESTS_MIN = 8
_FORM = 'step_costs as in `baton status --json`: {"points": [{"tokens": 1, "seconds": 0.004}], "key_s": 0, "pair_s": 0}'


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompt and output together, of a mean request and of the longest one."""

    mean: float
    longest: int


def kind_by_roofline(
    size: ModelSize, gpu: Gpu, lengths: Lengths, *, ranks: int | None, link_bytes_per_s: float
) -> NodeKind:
    """The kind of node by a GPU's data sheet.

    Args:
        ranks: GPUs of one node; None: the least power of two on which weights and a useful cache fit.

    Raises:
        ConfigError: weights and cache do not fit.
    """
    needed = max(lengths.longest, int(_REQUESTS_MIN * lengths.mean))
    tried = [ranks] if ranks is not None else [1 << power for power in range(_RANKS_MAX.bit_length())]
    if not (tried := [each for each in tried if each >= size.ranks_min]):
        raise ConfigError(
            "the redundant experts need more ranks, because a rank holds an expert at most once",
            field="tensor_parallel_size",
            value=ranks,
            allowed=(f"at least {size.ranks_min}",),
        )
    for each in tried:
        tokens = cache_tokens(size, gpu, each)
        slots = state_slots(size, gpu, each)
        if tokens >= needed and (not size.state_bytes or slots >= LEAST_SLOTS):
            costs, seats = roofline(size, gpu, each), min(SEATS, slots) if size.state_bytes else SEATS
            return NodeKind(
                each,
                costs,
                costs,
                tokens,
                size.cached_bytes,
                link_bytes_per_s,
                seats=seats,
                prefill_seats=seats,
                state_bytes=size.state_bytes,
                kv_holders=kv_holders(size, each),
                memory=rank_memory(size, gpu.memory_gib, each),
                own_requests=size.own_requests,
            )
    states = f", recurrent states of {size.state_bytes / 1e9:,.2f} GB a request" if size.state_bytes else ""
    gpus = f"{tried[-1]} GPU{'s' if tried[-1] > 1 else ''} of {gpu.memory_gib:g} GiB"
    raise ConfigError(
        f"{size.weight_bytes / 1e9:.1f} GB of weights{states} and KV of {needed} tokens, {size.cached_bytes} bytes "
        f"each, do not fit on {gpus}",
        field="tensor_parallel_size",
        value=tried[-1],
        cure="give more GPUs to a node by --tensor-parallel-size, a larger GPU, or shorter requests",
    )


def kind_from_nodes(addresses: list[str], *, link_bytes_per_s: float) -> NodeKind:
    """The kind of live nodes: of one node, or of a prefill node and a decode node.

    Raises:
        BatonError: a node cannot be reached.
        ConfigError: it has not measured its steps.
    """

    async def ask() -> list[node_status_pb2.NodeStatus]:
        return list(await asyncio.gather(*map(describe, addresses)))

    statuses = asyncio.run(ask())
    known: dict[int, tuple[node_status_pb2.NodeStatus, StepCosts]] = {}
    for address, status in zip(addresses, statuses, strict=True):
        costs = costs_from_proto(status.step_costs) if status.HasField("step_costs") else None
        if costs is None:
            raise ConfigError(
                f"the node {address} has not measured what its steps cost", field="costs_from", value=address,
                cure="name a node on a GPU that has served some requests",
            )  # fmt: skip
        known[status.info.role] = status, costs
    # The number of the prefill role is the smaller one.
    (prefill, prefill_costs), (decode, decode_costs) = known[min(known)], known[max(known)]
    per_token, per_request = kept_bytes(decode.info.cache_spec)
    heads = 0 if decode.info.attention_data_parallel else decode.info.cache_spec.num_kv_heads
    return NodeKind(
        gpus=decode.info.tensor_parallel_size or 1,
        prefill=prefill_costs,
        decode=decode_costs,
        kv_tokens=decode.blocks_total * decode.info.cache_shape.block_size,
        kv_bytes_per_token=per_token,
        state_bytes=per_request,
        link_bytes_per_s=link_bytes_per_s,
        seats=decode.max_batch_requests or 512,
        prefill_seats=prefill.max_batch_requests or 512,
        also_decodes=prefill.info.also_decodes,
        kv_holders=heads,
        own_requests=decode.info.attention_data_parallel,
        drafts=measured_drafts(
            generated=decode.generated_tokens_total,
            drafted=decode.drafted_tokens_total,
            accepted=decode.accepted_tokens_total,
        ),
    )


def read_costs(path: Path) -> tuple[StepCosts, StepCosts]:
    """The costs of prefill nodes and of decode nodes, from a file with one object for both, or one for each role.

    Raises:
        ConfigError: the file cannot be read, or has another form.
    """
    try:
        found = json.loads(read_regular_file(path, bytes_max=_FILE_BYTES_MAX))
        if "prefill" in found:
            return _costs(found["prefill"]), _costs(found["decode"])
        costs = _costs(found.get("step_costs", found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(
            f"the costs in {path} cannot be read: {error!r}", field="costs", value=path, allowed=(_FORM,)
        ) from None
    return costs, costs


def _costs(found: Mapping[str, Any]) -> StepCosts:
    points = tuple((int(point["tokens"]), float(point["seconds"])) for point in found["points"])
    pairs = list(pairwise(points))
    if not points or points[0][1] <= 0 or any(high[0] <= low[0] or high[1] < low[1] for low, high in pairs):
        raise ValueError("points ascend in tokens and seconds, from above 0 s")
    others = {name: float(found.get(name, 0.0)) for name in ("key_s", "pair_s", "decode_row_s", "prompt_step_s")}
    return StepCosts(points, **others)
