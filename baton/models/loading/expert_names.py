"""Translates publishers' names of experts and sinks to our modules' names: `mlp.gate`, `mlp.experts.N.gate_proj`,
`mlp.shared_experts`. It cuts tensors with all experts into one per expert, and reads no weights.
"""

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace

from baton.models.checkpoint.checkpoint import StoredTensor

_LAYER = r"^((?:model|mtp)\.layers\.\d+)\."
_RENAMED = tuple(
    (re.compile(_LAYER + theirs), rf"\1.{ours}")
    for theirs, ours in (
        (r"block_sparse_moe\.input_linear\.weight$", "mlp.experts.gate_up_proj"),
        (r"block_sparse_moe\.output_linear\.weight$", "mlp.experts.down_proj"),
        (r"block_sparse_moe\.", "mlp."),
        (r"shared_mlp\.input_linear\.", "mlp.shared_experts.gate_up_proj."),
        (r"shared_mlp\.output_linear\.", "mlp.shared_experts.down_proj."),
        (r"feed_forward\.experts\.(\d+)\.w([123])\.", r"mlp.experts.\2.w\3."),
        (r"mlp\.experts\.(\d+)\.w1\.", r"mlp.experts.\2.gate_proj."),
        (r"mlp\.experts\.(\d+)\.w3\.", r"mlp.experts.\2.up_proj."),
        (r"mlp\.experts\.(\d+)\.w2\.", r"mlp.experts.\2.down_proj."),
        (r"mlp\.shared_(?:expert|mlp)\.", "mlp.shared_experts."),
        (r"mlp\.(?:router|gate)\.(?:layer|wg)\.", "mlp.gate."),
        (r"mlp\.router\.(?:classifier\.)?", "mlp.gate."),
        (r"mlp\.(?:gate\.)?(?:moe_statics\.)?e_score_correction_bias$", "mlp.gate.e_score_correction_bias"),
        (r"self_attn\.attention_sink_bias$", "self_attn.sinks"),
    )
)
_ALL_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)(_scale_inv)?$")
_CORRECTION = ".e_score_correction_bias"


def our_name(name: str) -> str:
    """Returns our name for a publisher's tensor or module."""
    for theirs, ours in _RENAMED:
        name = theirs.sub(ours, name)
    return name


def in_our_names(stored: Mapping[str, StoredTensor], known: Container[str]) -> dict[str, StoredTensor]:
    """Returns the tensors by our names. A name is kept if it is in `known`, or if another tensor already has its
    translation."""
    ours = {name: tensor for name, tensor in stored.items() if name in known}
    for name, tensor in stored.items():
        if name in known:
            continue
        translated = dict(_translated(our_name(name), tensor))
        ours |= {name: tensor} if ours.keys() & translated.keys() else translated
    return ours


def _translated(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    if name.endswith(_CORRECTION) and tensor.shape[:1] == (1,) and len(tensor.shape) == 2:
        yield name, replace(tensor, shape=tensor.shape[1:])
        return
    match = _ALL_EXPERTS.search(name)
    halves = 1 if match is None or match[1] == "down_proj" else 2
    if match is None or len(tensor.shape) != 3 or tensor.shape[1] % halves:
        yield name, tensor
        return
    parameter = "weight" if match[2] is None else "weight_scale_inv"
    for expert in range(tensor.shape[0]):
        own = tensor.part(0, range(expert, expert + 1))
        own = replace(own, shape=own.shape[1:])
        prefix, rows = f"{name[: match.start()]}.mlp.experts.{expert}", own.shape[0] // halves
        for half, part in enumerate(("down_proj",) if halves == 1 else ("gate_proj", "up_proj")):
            yield f"{prefix}.{part}.{parameter}", own.part(0, range(half * rows, (half + 1) * rows))
