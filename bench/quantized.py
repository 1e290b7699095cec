"""Decode steps with quantized weights on this machine's GPU: random weights in the shapes of common models, against
what the step must read, and against the same model in bfloat16."""

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from baton.engine.build import BuiltRunner, build_runner
from baton.models.families.moe.gpt_oss import Mxfp4Experts
from baton.models.quantization.packed_linear import PackedLinear
from baton.settings.node_config import NodeSettings
from bench.attention.measure import Ceilings, ceilings
from bench.engine.roofline import Weights, count_weights, decode_work
from bench.engine.steps import decode_ms
from bench.table import Row

_CONFIGS = Path(__file__).resolve().parent / "engine" / "configs"
_BATCHES = (1, 8, 32, 128, 256)
_CONTEXT = 1024
_GPTQ = MappingProxyType({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True})
_AWQ = MappingProxyType({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"})
_NUMBERS = MappingProxyType({"num_bits": 8, "type": "int", "symmetric": True})
_INT8 = MappingProxyType(
    {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_NUMBERS, "strategy": "channel"},
                "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
            }
        },
    }
)


@dataclass(frozen=True)
class _Case:
    """One quantized model to measure.

    Attributes:
        base: the directory of the config.
        fields: replace some of its fields.
        plain: name of the case in bfloat16 to compare with.
        most_of_plain: the largest share of that case's step at one row.
        goal: the share of the roofline at one row and at 32.
    """

    name: str
    base: str
    fields: MappingProxyType[str, Any] = MappingProxyType({})
    plain: str = ""
    most_of_plain: float | None = None
    goal: float | None = None


def _quantized(quantization: MappingProxyType[str, Any], **fields: Any) -> MappingProxyType[str, Any]:
    return MappingProxyType({"quantization_config": dict(quantization), **fields})


_LLAMA, _GPT_OSS = "llama-3.1-8b", "gpt-oss-20b"
_CASES = (
    _Case(_LLAMA, _LLAMA),
    _Case(f"{_LLAMA}-fp8", f"{_LLAMA}-fp8", plain=_LLAMA, goal=0.80),
    _Case(f"{_LLAMA}-gptq-int4", _LLAMA, _quantized(_GPTQ), plain=_LLAMA, most_of_plain=0.45),
    _Case(f"{_LLAMA}-awq-int4", _LLAMA, _quantized(_AWQ), plain=_LLAMA, most_of_plain=0.45),
    _Case(f"{_LLAMA}-int8", _LLAMA, _quantized(_INT8), plain=_LLAMA),
    _Case(f"{_GPT_OSS}-bfloat16", _GPT_OSS, MappingProxyType({"quantization_config": None})),
    _Case(f"{_GPT_OSS}-mxfp4", _GPT_OSS, plain=f"{_GPT_OSS}-bfloat16", goal=0.65),
    _Case("gpt-oss-120b-mxfp4", "gpt-oss-120b", goal=0.65),
)


def run(progress: Callable[[str], None], names: tuple[str, ...] = ()) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU.

    Args:
        names: names of cases; none for all.
    """
    if not torch.cuda.is_available():
        progress("quantized: needs a GPU")
        return
    machine = ceilings()
    yield Row("copy", "2 GiB", machine.copy_gigabytes_per_s, "GB/s")
    took_ms: dict[tuple[str, int], float] = {}
    for case in _CASES:
        if not names or case.name in names:
            progress(f"quantized: {case.name}")
            yield from _of_case(case, machine, took_ms)


def _of_case(case: _Case, machine: Ceilings, took_ms: dict[tuple[str, int], float]) -> Iterator[Row]:
    built = _build(case)
    weights = _counted(built)
    for batch in _BATCHES:
        step_ms = took_ms[case.name, batch] = decode_ms(built.runner, requests=batch, context=_CONTEXT)
        work = decode_work(built.config, weights, built.cache.spec, requests=batch, context=_CONTEXT)
        where = f"{case.name}, batch {batch}, context {_CONTEXT}"
        yield Row(
            "decode step",
            where,
            step_ms,
            "ms",
            "roofline",
            work.milliseconds(machine),
            goal=case.goal if batch <= 32 else None,
            less_is_better=True,
        )
        plain_ms = took_ms.get((case.plain, batch))
        if plain_ms is not None:
            limit = case.most_of_plain if batch == 1 else None
            yield Row("decode step over bfloat16's", where, step_ms / plain_ms, "x", limit=limit)
    del built
    gc.collect()
    torch.cuda.empty_cache()


def _build(case: _Case) -> BuiltRunner:
    with tempfile.TemporaryDirectory() as directory:
        values = json.loads((_CONFIGS / case.base / "config.json").read_text()) | dict(case.fields)
        (Path(directory) / "config.json").write_text(json.dumps(values))
        settings = NodeSettings(
            model=Path(directory), device="cuda", load_format="dummy", max_batch_requests=_BATCHES[-1], block_size=16
        )
        built = build_runner(settings)
    built.runner.prepare()
    return built


def _counted(built: BuiltRunner) -> Weights:
    """The model's parameters in bytes as they are stored, with scales and zeros, and in numbers."""
    model = built.runner.model
    weights = count_weights(model, tied=built.config.tie_word_embeddings)
    for module in model.modules():
        if isinstance(module, PackedLinear):
            extra = module.in_features * module.out_features - module.weight.numel()
            tensors = [tensor for each in module.weights for tensor in (each.scales_GN, each.zeros_GN)]
            num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
            weights = replace(
                weights,
                dense_bytes=weights.dense_bytes + num_bytes,
                dense_numbers=weights.dense_numbers + extra,
            )
        elif isinstance(module, Mxfp4Experts):
            extra = module.gate_up_proj_blocks.numel() + module.down_proj_blocks.numel()
            weights = replace(weights, experts_numbers=weights.experts_numbers + extra)
    return weights


if __name__ == "__main__":
    import sys

    from bench.table import print_rows

    print_rows("Quantized weights on a GPU", list(run(print, tuple(sys.argv[1:]))))
