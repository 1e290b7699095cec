"""Time that 64 constrained rows add to a decode step."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from baton.core.sampling import ResolvedSampling
from baton.core.types import Grammar, GrammarKind
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.grammar_rows import GrammarRows
from baton.grammar.compiler import GrammarCompiler
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import NodeSettings
from bench.engine.run import CONFIGS
from bench.engine.steps import decode_ms
from bench.structured_output.tokenizer import EOS_ID
from bench.structured_output.works import WORKS
from bench.table import Row

_ROWS = 64
_CONTEXT = 1024
_ROUNDS = 4


def steps(path: Path, *, vocab_size: int) -> Iterator[Row]:
    on_gpu = torch.cuda.is_available()
    name = "llama-3.1-8b" if on_gpu else "demo Llama"
    built = _built_on_gpu() if on_gpu else _built_on_cpu()
    if on_gpu:
        compiler = GrammarCompiler(path, vocab_size, (EOS_ID,))
        built.runner.grammars = GrammarRows(compiler, built.cache.view.device)
    torch.set_num_threads(torch.get_num_threads() if on_gpu else 1)
    built.runner.prepare()
    context = _CONTEXT if on_gpu else 64
    drawn = [ResolvedSampling(temperature=1.0, seed=seed, max_tokens=1 << 20) for seed in range(_ROWS)]
    # Arrays of outputs, so that no output ends while it is measured.
    schemas = [work.schema for work in WORKS if "$ref" not in work.schema]
    texts = [json.dumps({"type": "array", "items": schema, "minItems": 10_000}) for schema in schemas]
    bound = [
        replace(params, grammar=Grammar(GrammarKind.JSON_SCHEMA, texts[row % len(texts)]))
        for row, params in enumerate(drawn)
    ]
    # One after the other in each round, so that a disturbance of the machine does not decide between them.
    cases = {count: [*bound[:count], *drawn[count:]] for count in (0, 1, _ROWS)}
    measured: dict[int, list[float]] = {count: [] for count in cases}
    for _ in range(_ROUNDS):
        for count, params in cases.items():
            measured[count].append(decode_ms(built.runner, requests=_ROWS, context=context, params=params))
    free_ms = min(measured[0])
    for count in (1, _ROWS):
        measured_ms = min(measured[count])
        work = f"{name}, {_ROWS} rows, context {context}, {count} constrained"
        yield Row("decode step", work, measured_ms, "ms", "all free", free_ms, less_is_better=True)
        limit = 5.0 if on_gpu else None
        yield Row("cost of grammars", work, (measured_ms / free_ms - 1) * 100, "%", limit=limit)


def _built_on_gpu() -> BuiltRunner:
    return build_runner(
        NodeSettings(
            model=CONFIGS / "llama-3.1-8b",
            device="cuda",
            load_format="dummy",
            max_batch_requests=_ROWS,
            max_batch_tokens=2048,
            num_blocks=8192,
        )
    )


def _built_on_cpu() -> BuiltRunner:
    return build_runner(NodeSettings(model=DEMO_MODELS / "llama", device="cpu", num_blocks=1024))
