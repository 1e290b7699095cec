"""Drives a batch-invariant model token by token, so that tests compare a request's logits alone and in a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from attention.metadata import build_common_metadata
from attention.selection import select_backend
from baton.kvcache.cache import PagedKVCache
from baton.kvcache.layout import parse_layout
from baton.kvcache.spec import KVCacheShape, KVKind
from baton.models.families.reader import read_config
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.models.layers.step_context import StepContext
from baton.models.loading.loader import load_model
from baton.models.loading.local_config import local_config
from baton.models.loading.needs import attention_needs, kv_cache_spec
from tests.unit.models.recurrent_steps import state_rows

MAX_REQUESTS = 40


@dataclass
class Request:
    """Tokens to compute: the first `prompt` of them in chunks of `chunk`, the others one by one."""

    tokens: Sequence[int]
    prompt: int
    chunk: int
    computed: int = 0

    def take(self) -> list[int]:
        """The tokens of the next step; empty after the last one."""
        size = min(self.chunk, self.prompt - self.computed) if self.computed < self.prompt else 1
        taken = list(self.tokens[self.computed : self.computed + size])
        self.computed += len(taken)
        return taken


class Invariant:
    """A model in `directory` in batch-invariant mode over a cache of its own; each run begins with an empty cache."""

    def __init__(
        self,
        directory: Path,
        *,
        device: str,
        dtype: str,
        block_size: int = 4,
        num_blocks: int = 1024,
        load_format: str = "safetensors",
        backend: str | None = None,
        workspace_tokens: int = 4096,
        batch_invariant: bool = True,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        config = read_config(directory)
        self.vocab_size = config.vocab_size
        self.block_size, self.device = block_size, device
        local = local_config(config, parallel)
        spec = kv_cache_spec(local, dtype)
        layout = parse_layout("NHD", mla=spec.kind is KVKind.MLA)
        state_slots = 0 if config.recurrent is None else MAX_REQUESTS
        shape = KVCacheShape(layout, block_size, num_blocks, state_slots=state_slots)
        needs = attention_needs(
            local,
            dtype=dtype,
            device=device,
            shape=shape,
            max_num_reqs=MAX_REQUESTS,
            batch_invariant=batch_invariant,
        )
        self.backend = select_backend(needs, forced=backend, context_workspace_tokens=workspace_tokens)
        self.model = load_model(
            directory,
            config,
            backend=self.backend,
            dtype=dtype,
            device=device,
            load_format=load_format,
            batch_invariant=batch_invariant,
            parallel=parallel,
        )
        self.cache = PagedKVCache(spec, shape, device)

    @torch.inference_mode()
    def run(self, target: Request, others: Mapping[int, Sequence[Request]], *, seed: int = 0) -> list[Tensor]:
        """Returns the target's hidden states of every step, and the logits of its last token.

        Args:
            others: by the step in which they come; single tokens go first, in an order drawn anew in every step.
            seed: for that order, and for the choice of blocks.
        """
        for part in self.cache.parts:
            part.storage.fill_(torch.nan)
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(self.cache.shape.num_blocks, generator=generator).tolist()
        running = [target]
        blocks: dict[int, list[int]] = {}
        slots: dict[int, int] = {}
        results = []
        step = 0
        while target.computed < len(target.tokens):
            running += others.get(step, ())
            step += 1
            order = [running[place] for place in torch.randperm(len(running), generator=generator).tolist()]
            starts = {id(request): request.computed for request in order}
            batch = [(request, tokens) for request in order if (tokens := request.take())]
            batch.sort(key=lambda part: len(part[1]) > 1)
            for request, _ in batch:
                own = blocks.setdefault(id(request), [])
                while len(own) * self.block_size < request.computed:
                    own.append(free.pop())
            common, positions_T = build_common_metadata(
                query_lens=[len(tokens) for _, tokens in batch],
                context_lens=[starts[id(request)] for request, _ in batch],
                block_tables=[blocks[id(request)] for request, _ in batch],
                block_size=self.block_size,
                device=self.device,
            )
            token_ids_T = torch.tensor([token for _, tokens in batch for token in tokens]).to(self.device)
            metadata = self.backend.builder.build(0, common)
            states = None
            if self.cache.state is not None:
                slots_R = [slots.setdefault(id(request), len(slots)) for request, _ in batch]
                lens_R = [len(tokens) for _, tokens in batch]
                contexts_R = [starts[id(request)] for request, _ in batch]
                rows = state_rows(slots_R, lens_R, contexts_R, device=self.device)
                states = replace(rows, in_order=self.backend.capabilities.rows_in_order)
            context = StepContext(metadata, states=states)
            hidden_TD = self.model.compute(token_ids_T, positions_T, self.cache, context)
            place = next(index for index, (request, _) in enumerate(batch) if request is target)
            own_rows = slice(*common.query_start_loc_cpu[place : place + 2].tolist())
            last_R = common.query_start_loc[1:].long() - 1
            logits_RV = self.model.compute_logits(hidden_TD[last_R])
            results.append(torch.cat((hidden_TD[own_rows].float().flatten(), logits_RV[place])).cpu())
        return results


def hidden_states(model: Invariant, tokens: Sequence[int], *, chunk: int) -> Tensor:
    """[T, D], of a sequence that is computed in chunks of this size, alone; in float32."""
    steps = model.run(Request(tokens, len(tokens), chunk), {})
    sizes = [min(chunk, len(tokens) - start) for start in range(0, len(tokens), chunk)]
    return torch.cat([step[: -model.vocab_size].view(rows, -1) for step, rows in zip(steps, sizes, strict=True)])


def drawn_tokens(model: Invariant, count: int) -> list[int]:
    drawn: list[int] = torch.randint(3, model.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return drawn


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens of the compared request, and the longest prompts next to it."""

    prompt: int
    outputs: int
    chunk: int
    longest: int


def differences(model: Invariant, lengths: Lengths, sizes: Sequence[int]) -> dict[int, list[int]]:
    """By the number of requests in the batch, the steps in which a request's hidden states or logits differ from those
    that it has alone."""

    def target() -> Request:
        return _request(model.vocab_size, lengths.prompt, lengths.outputs, lengths.chunk, seed=1)

    alone = model.run(target(), {})
    found = {}
    for size in sizes:
        among = model.run(target(), _company(model.vocab_size, size - 1, lengths), seed=size)
        assert len(among) == len(alone)
        found[size] = [step for step, pair in enumerate(zip(alone, among, strict=True)) if not torch.equal(*pair)]
    return found


def _company(vocab_size: int, size: int, lengths: Lengths) -> dict[int, list[Request]]:
    """Other requests of all lengths, by the step in which they come: most of them in the first."""
    generator = torch.Generator().manual_seed(size)
    prompts = torch.randint(1, lengths.longest, (size,), generator=generator).tolist()
    coming: dict[int, list[Request]] = {}
    for index, prompt in enumerate(prompts):
        step = 0 if index % 3 else index % 5
        coming.setdefault(step, []).append(_request(vocab_size, prompt, 12, lengths.chunk, seed=100 + index))
    return coming


def _request(vocab_size: int, prompt: int, outputs: int, chunk: int, *, seed: int) -> Request:
    generator = torch.Generator().manual_seed(seed)
    return Request(torch.randint(3, vocab_size, (prompt + outputs,), generator=generator).tolist(), prompt, chunk)
