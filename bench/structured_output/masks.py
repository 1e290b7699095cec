"""How long masks take in each library, and what each library refuses."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from baton.core.types import Grammar, GrammarKind
from baton.grammar.matcher import MaskFiller
from baton.settings.config import DEMO_MODELS, tokenizer_file
from bench.structured_output.libraries import Llguidance, Times, XGrammar, token_ids
from bench.structured_output.works import WORKS
from bench.table import Row

_SUITE = Path(__file__).resolve().parents[2] / "tests" / "conformance" / "json_schema" / "suite" / "draft2020-12"
_ROWS = 64


def masks(path: Path, tokenizer: Tokenizer, progress: Callable[[str], None]) -> Iterator[Row]:
    if find_spec("xgrammar") is None:
        progress("structured: xgrammar is not installed, so nothing is compared with it")
        return
    ours, rival = Llguidance(path, tokenizer), XGrammar(tokenizer)
    all_ours, all_rivals = Times(), Times()
    for work in WORKS:
        our_times, rival_times = ours.times(work), rival.times(work)
        all_ours.add(our_times)
        all_rivals.add(rival_times)
        yield _row("mask, mean", work.name, _mean_us(our_times.mask_s), _mean_us(rival_times.mask_s), "us")
    for name, value in (("mean", _mean_us), ("p99", _p99_us), ("worst", _worst_us)):
        yield _row(f"mask, {name}", "all schemas", value(all_ours.mask_s), value(all_rivals.mask_s), "us")
    ours_ms, rivals_ms = np.mean(all_ours.compile_s) * 1e3, np.mean(all_rivals.compile_s) * 1e3
    yield _row("compile, mean", "all schemas", float(ours_ms), float(rivals_ms), "ms")


def batches(path: Path, tokenizer: Tokenizer) -> Iterator[Row]:
    """Masks of 64 rows at once, each row at another place of its output."""
    ours = Llguidance(path, tokenizer)
    matchers = []
    for row in range(_ROWS):
        work = WORKS[row % len(WORKS)]
        matcher = ours.compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(work.schema)))
        ids = token_ids(tokenizer, work.output)
        for token_id in ids[: row * len(ids) // _ROWS]:
            matcher.consume(token_id)
        matchers.append(matcher)
    masks = np.empty((_ROWS, matchers[0].words), np.int32)
    filler = MaskFiller()
    times = []
    for _ in range(50):
        start_s = time.perf_counter()
        filler.fill(matchers, masks)
        times.append(time.perf_counter() - start_s)
    yield Row(f"masks of {_ROWS} rows", "one step, first time", times[0] * 1e6, "us")
    yield Row(f"masks of {_ROWS} rows", "one step, median", float(np.median(times)) * 1e6, "us")


def refusals() -> Iterator[Row]:
    """Schemas of the required keywords of draft 2020-12: refused ones, and wrong verdicts on others. With the small
    tokenizer of the demo models, because verdicts do not depend on it."""
    path = tokenizer_file(DEMO_MODELS / "llama")
    tokenizer = Tokenizer.from_file(str(path))
    counts = []
    for library in (Llguidance(path, tokenizer), XGrammar(tokenizer)):
        refused = wrong = stricter = 0
        for file in sorted(_SUITE.glob("*.json")):
            for case in json.loads(file.read_text(encoding="utf-8")):
                verdicts = library.verdicts(case["schema"], [test["data"] for test in case["tests"]])
                refused += verdicts is None
                for test, verdict in zip(case["tests"], verdicts or (), strict=False):
                    wrong += verdict and not test["valid"]
                    stricter += test["valid"] and not verdict
        counts.append((refused, wrong, stricter))
    names = ("schemas refused", "invalid instances accepted", "valid instances not accepted")
    for name, ours, theirs in zip(names, *counts, strict=True):
        yield Row(name, "JSON-Schema-Test-Suite, llguidance as Baton asks it", ours, "")
        yield Row(name, "JSON-Schema-Test-Suite, xgrammar", theirs, "")


def _row(name: str, work: str, ours: float, rivals: float, unit: str) -> Row:
    return Row(name, work, ours, unit, "xgrammar", rivals, less_is_better=True)


def _mean_us(times_s: Sequence[float]) -> float:
    return float(np.mean(times_s)) * 1e6


def _p99_us(times_s: Sequence[float]) -> float:
    return float(np.percentile(times_s, 99)) * 1e6


def _worst_us(times_s: Sequence[float]) -> float:
    return max(times_s) * 1e6
