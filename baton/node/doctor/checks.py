"""Runs all checks in turn and prints each verdict at once. Exit code 1 when a check failed."""

import argparse
import importlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations_with_replacement

from rich.console import Console
from rich.markup import escape

from baton.core.errors import ConfigError
from baton.core.memory import memory_limit_bytes
from baton.node.doctor.machine import Wanted, check_machine, read_host
from baton.node.doctor.verdict import Grade, Verdict, fail, ok, warn
from baton.settings.config import MIB
from baton.settings.environment import visible_gpus
from baton.settings.node_config import CPU_CACHE_MIB, DecodeSettings
from baton.settings.reader import read_settings

_COLORS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}
_MOST_GPUS_LINKED = 2
_TEMPLATE_CURE = "give the gateway a template in a known format by --chat-template: docs/chat.md lists the formats"


def checks(pairs: int, floor_gigabytes_per_s: float, template_warnings: Sequence[str] = ()) -> Iterator[Verdict]:
    """All verdicts. Each check comes after the checks that it depends on.

    Args:
        template_warnings: what a gateway would say about the model's chat templates.
    """
    for found in template_warnings:
        yield warn("chat template", found, _TEMPLATE_CURE)
    settings = read_settings(DecodeSettings, "baton doctor", [])
    on_gpu = settings.device.startswith("cuda") or (settings.device == "auto" and visible_gpus() > 0)
    cache_bytes = 0 if on_gpu else cache_bytes_of(settings)
    staging_bytes = settings.staging_bytes(on_gpu=on_gpu)
    yield from check_machine(Wanted(pairs, cache_bytes, staging_bytes), read_host())
    broken = False
    for verdict in check_packages():
        broken = broken or verdict.grade is Grade.FAIL
        yield verdict
    if broken:
        return
    # Imported here, because these modules need the packages that were just checked.
    import torch

    from baton.node.doctor.gpus import check_gpus
    from baton.node.doctor.link import check_link

    yield check_link(("cpu", "cpu"), floor_gigabytes_per_s=floor_gigabytes_per_s, forks=True)
    yield from check_gpus()
    gpus = [f"cuda:{index}" for index in range(min(torch.cuda.device_count(), _MOST_GPUS_LINKED))]
    for pair in combinations_with_replacement(gpus, 2):
        yield check_link(pair, floor_gigabytes_per_s=floor_gigabytes_per_s)


def cache_bytes_of(settings: DecodeSettings) -> int:
    """Main memory that the caches of a node's ranks take; that of the default cache if the model cannot be read."""
    ranks = settings.tensor_parallel_size
    smallest = (settings.kv_cache_bytes or CPU_CACHE_MIB * MIB) * ranks
    if settings.kv_cache_bytes is not None:
        return smallest
    try:
        # Imported here, so that without torch the other checks still report what is missing.
        from baton.engine.cpu_cache import cpu_cache_bytes
        from baton.engine.draft_layer import with_draft_layer
        from baton.kvcache.spec import KV_CACHE_DTYPES
        from baton.models.families.reader import read_config
        from baton.models.layers.parallel import TensorParallel
        from baton.models.loading.local_config import local_config
        from baton.models.loading.needs import kv_cache_spec, resolve_dtype

        config = read_config(settings.model).for_context(settings.max_context_tokens)
        dtype = resolve_dtype(config, settings.dtype, device_type="cpu")
        parallel = TensorParallel(0, ranks)
        rank_config = local_config(with_draft_layer(config, settings), parallel)
    except (ImportError, ConfigError):
        return smallest
    spec = kv_cache_spec(rank_config, dtype, KV_CACHE_DTYPES[settings.kv_cache_dtype])
    if settings.num_blocks is not None:
        return settings.num_blocks * settings.block_size * spec.bytes_per_token * ranks
    context_tokens, memory_bytes = config.max_context_tokens, memory_limit_bytes()
    return cpu_cache_bytes(settings, spec, context_tokens=context_tokens, memory_bytes=memory_bytes) * ranks


def main() -> int:
    parser = argparse.ArgumentParser(prog="baton doctor", description=__doc__)
    parser.add_argument("--pairs", type=int, required=True, help="number of peers of a node here")
    parser.add_argument("--min-gb-per-s", type=float, required=True, help="slowest acceptable link")
    parser.add_argument("--template-warning", action="append", default=[], help="what a gateway says about the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    verdicts = checks(given.pairs, given.min_gb_per_s, given.template_warning)
    if given.json:
        return _print_json(verdicts)
    console = Console(highlight=False, soft_wrap=True)
    failed = 0
    for verdict in verdicts:
        failed += verdict.grade is Grade.FAIL
        color = _COLORS[verdict.grade]
        console.print(f"[{color}]{verdict.grade.value:4}[/] {escape(verdict.check)}: {escape(verdict.found)}")
        if verdict.cure:
            console.print(f"     {escape(verdict.cure)}")
    console.print(f"{failed} failed" if failed else "all well")
    return 1 if failed else 0


# Distribution, module, and whether a node runs without it.
_NEEDED = (("torch", "torch"), ("triton", "triton"), ("grpcio", "grpc"), ("ucxx-cu13", "ucxx"))
_REINSTALL = "install the package again in an environment of its own: pip install baton-serving"


def check_packages() -> Iterator[Verdict]:
    for distribution, module in _NEEDED:
        yield _import(distribution, module)


def _import(distribution: str, module: str) -> Verdict:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (a broken library may raise anything)
        return fail(distribution, f"does not import: {type(error).__name__}: {error}", _REINSTALL)
    try:
        return ok(distribution, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return warn(distribution, f"{module} works, but its version is unknown", _REINSTALL)


def _print_json(verdicts: Iterable[Verdict]) -> int:
    """Prints all verdicts as one object; returns the exit code."""
    found = list(verdicts)
    ok = all(verdict.grade is not Grade.FAIL for verdict in found)
    Console(soft_wrap=True).print_json(data={"ok": ok, "checks": [asdict(verdict) for verdict in found]}, indent=None)
    return 0 if ok else 1
