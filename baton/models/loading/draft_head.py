"""Builds an EAGLE-3 head for a loaded model, and fills it from the head's own checkpoint, or at random."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attention.backend import AttentionBackend
from baton.core.errors import ConfigError
from baton.kvcache.cache import TORCH_DTYPES
from baton.kvcache.spec import FP8_DTYPES
from baton.models.checkpoint.share import Share
from baton.models.checkpoint.tensor_reader import read_into
from baton.models.config.model_config import EagleConfig, ModelConfig
from baton.models.families.dense.eagle_config import head_tensors
from baton.models.families.dense.llama import LlamaAttention
from baton.models.layers.causal_lm import CausalLM
from baton.models.layers.eagle import EagleHead
from baton.models.layers.parallel import SINGLE, TensorParallel, of_layer
from baton.models.layers.products import make_batch_invariant, use_decode_products
from baton.models.loading.checkpoint_check import check_tensors
from baton.models.loading.dummy import fill_at_random, fill_part_at_random
from baton.models.loading.identity import plain_values, weights_digest
from baton.models.loading.kv_scales import add_scales
from baton.models.loading.loader import cut, module_views, take_shares
from baton.models.loading.local_config import local_config
from baton.models.loading.shares import Shares


class HeadShares(Shares):
    """The parts of a head's checkpoint that one rank holds: parts of the layer and of its embedding, and the rest."""

    def __init__(self, head: EagleConfig, parallel: TensorParallel) -> None:
        super().__init__(head.layer, of_layer(parallel))

    def of(self, name: str) -> Share | None:
        if name == "embed_tokens.weight":
            return super().of(f"model.{name}")
        return super().of(name.removeprefix("midlayer.")) if name.startswith("midlayer.") else None


def head_digest(directory: Path, head: EagleConfig, *, load_format: str) -> str:
    """Returns a digest of a head, which two nodes compare: KV of another head would only bring bad drafts, which
    nobody would notice."""
    weights = "dummy" if load_format == "dummy" else weights_digest(directory)
    return hashlib.sha256(json.dumps([plain_values(head), weights], sort_keys=True).encode()).hexdigest()


def load_head(
    directory: Path,
    model: CausalLM,
    config: ModelConfig,
    *,
    backend: AttentionBackend,
    dtype: str,
    device: torch.device | str,
    kv_dtype: str = "",
    load_format: str = "safetensors",
    batch_invariant: bool = False,
    parallel: TensorParallel = SINGLE,
) -> None:
    """Gives `model` the EAGLE-3 head of its config, loaded from `directory`. Arguments are those of `load_model`.

    Args:
        config: of the whole model.
        backend: for the head's attention.

    Raises:
        ConfigError: the head cannot be split so, or its checkpoint is damaged or does not fit its config.
    """
    parallel = replace(parallel, in_order=batch_invariant)
    whole, local = config.eagle, local_config(config, parallel).eagle
    assert whole is not None
    assert local is not None
    build = partial(_build, backend=backend, vocab_size=config.vocab_size, dtype=TORCH_DTYPES[dtype])
    with torch.device(device):
        head = build(local)
        if kv_dtype in FP8_DTYPES:
            add_scales(head)
    head.join(parallel)
    head.requires_grad_(requires_grad=False).eval()
    shares = HeadShares(whole, parallel)
    if load_format != "dummy":
        views, stored = dict(_views(head)), head_tensors(directory)
        check_tensors(stored, views, shares, whole.layer, directory)
        read_into([part for name, view in views.items() for part in cut(stored[name], view, shares.of(name))])
    elif parallel.size == 1:
        fill_at_random(head)
    else:
        with torch.device("meta"):
            everything = build(whole)
        fill_part_at_random(everything, partial(take_shares, head, shares), device)
    _check_tokens(head, directory)
    head.finish()
    if batch_invariant:
        make_batch_invariant(head)
    elif parallel.size == 1:
        use_decode_products(head)
    model.use_head(head)


def _build(head: EagleConfig, *, backend: AttentionBackend, vocab_size: int, dtype: torch.dtype) -> EagleHead:
    size = head.layer.hidden_size
    attention = LlamaAttention(
        size,
        head.attention,
        layer_index=0,
        norm_eps=head.layer.norm_eps,
        backend=backend,
        dtype=dtype,
        input_size=2 * size,
    )
    return EagleHead(head, attention, backend=backend, vocab_size=vocab_size, dtype=dtype)


def _views(head: EagleHead) -> Iterator[tuple[str, Tensor]]:
    """Yields (name in the checkpoint, memory that it fills)."""
    for path, module in head.named_modules():
        yield from module_views(path, module)
    if head.d2t is not None:
        yield "d2t", head.d2t


def _check_tokens(head: EagleHead, directory: Path) -> None:
    """Checks that the head's tokens are different tokens of the model."""
    if head.d2t is None:
        return
    tokens = (head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)).tolist()
    wrong = next((token for token in tokens if not 0 <= token < head.vocab_size), None)
    if wrong is None and len(set(tokens)) == len(tokens):
        return
    problem = "names a token twice" if wrong is None else f"names token {wrong}"
    raise ConfigError(
        f"the tensor d2t of the EAGLE-3 head in {directory} {problem}",
        field="draft_head",
        value=str(directory),
        allowed=(f"different tokens from 0 to {head.vocab_size - 1}",),
        cure="download the head again",
    )
