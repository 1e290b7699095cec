"""Random queries of an indexer over paged index keys and latents, in a cache that is NaN where nobody wrote."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.metadata import build_common_metadata
from attention.sparse import SparseQueries, sparse_prefills
from tests.device import DEVICE


@dataclass(frozen=True)
class SparseCase:
    """`index_keys`, `latents`: each request's, token after token, float32."""

    q_THD: Tensor
    weights_TH: Tensor
    index_layer: Tensor
    kv_layer: Tensor
    q_THC: Tensor
    queries: SparseQueries
    index_keys: list[Tensor]
    latents: list[Tensor]
    slots: list[Tensor]

    def requests(self) -> list[int]:
        """The request of each query."""
        numbers: list[int] = self.queries.requests_T.tolist()
        return numbers


def make_case(
    sizes: list[tuple[int, int]],
    *,
    top_k: int,
    num_heads: int = 3,
    head_dim: int = 20,
    query_heads: int = 5,
    latent: int = 12,
    rotary: int = 4,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    whole_numbers: bool = False,
    device: str = DEVICE,
) -> SparseCase:
    """Makes a case with random queries, keys and latents.

    Args:
        sizes: (new tokens, context) of each request.
        whole_numbers: draw small integers, so that many scores are equal.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator)
        return values.round() if whole_numbers else values

    lens = [new + context for new, context in sizes]
    counts = [-(-length // block_size) for length in lens]
    dealt = iter((torch.randperm(sum(counts) + 2, generator=generator)).tolist())
    tables = [[next(dealt) for _ in range(count)] for count in counts]
    common, _ = build_common_metadata(
        query_lens=[new for new, _ in sizes],
        context_lens=[context for _, context in sizes],
        block_tables=tables,
        block_size=block_size,
        device=device,
    )
    num_tokens = sum(new for new, _ in sizes)
    index_cache = torch.full((1, sum(counts) + 2, block_size, 1, head_dim), torch.nan, dtype=dtype)
    kv_cache = torch.full((1, sum(counts) + 2, block_size, 1, latent + rotary), torch.nan, dtype=dtype)
    index_keys, latents, slots = [], [], []
    for table, length in zip(tables, lens, strict=True):
        positions = torch.arange(length)
        blocks, offsets = torch.tensor(table)[positions // block_size], positions % block_size
        keys, values = draw(length, head_dim).to(dtype), draw(length, latent + rotary).to(dtype)
        index_cache[0, blocks, offsets, 0], kv_cache[0, blocks, offsets, 0] = keys, values
        index_keys.append(keys.float())
        latents.append(values.float())
        slots.append(blocks * block_size + offsets)
    queries = sparse_prefills(common, 0, top_k=top_k, always=True)
    assert queries is not None
    weights_TH = draw(num_tokens, num_heads)
    return SparseCase(
        q_THD=draw(num_tokens, num_heads, head_dim).to(device, dtype),
        weights_TH=weights_TH.to(device),
        index_layer=index_cache.to(device),
        kv_layer=kv_cache.to(device),
        q_THC=draw(num_tokens, query_heads, latent + rotary).to(device, dtype),
        queries=queries,
        index_keys=index_keys,
        latents=latents,
        slots=slots,
    )


def expected_slots(case: SparseCase) -> list[list[int]]:
    """By the definition: every query's tokens sorted by score, of equal ones the first, then by position."""
    chosen = []
    for row, request in enumerate(case.requests()):
        seen = int(case.queries.seq_lens_T[row])
        keys = case.index_keys[request][:seen].double()
        dots_HS = (case.q_THD[row].double().cpu() @ keys.T).relu()
        scores_S = (case.weights_TH[row].double().cpu()[:, None] * dots_HS).sum(0)
        order = torch.sort(scores_S, descending=True, stable=True).indices[: case.queries.width]
        chosen.append(case.slots[request][order.sort().values].tolist())
    return chosen
