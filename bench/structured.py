"""Structured output: the time of masks in llguidance, which Baton uses, and in XGrammar; what each refuses; and what 64
constrained rows add to a step. Both get the same tokenizer of 128,256 tokens, made from this repository's own text.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.config import DEMO_MODELS, NodeSettings, tokenizer_file
from baton.errors import InvalidRequest
from baton.types import Grammar, GrammarKind, SamplingParams
from bench.engine.run import CONFIGS
from bench.engine.steps import decode_ms
from bench.table import Row
from engine.build import Built, build_runner
from engine.device.grammar_rows import GrammarRows
from grammar.compiler import GrammarCompiler
from grammar.matcher import MaskFiller

_ROOT = Path(__file__).resolve().parent.parent
_SUITE = _ROOT / "tests" / "conformance" / "json_schema" / "suite" / "draft2020-12"
_VOCAB_SIZE = 128_256
_ROWS = 64
_CONTEXT = 1024
_ROUNDS = 4
_EOS, _EOS_ID = "<|endoftext|>", 0
# Text of about 2 MiB gives enough words.
_TEXT_BYTES = 2 << 20

Json = Any


@dataclass(frozen=True)
class Work:
    """A schema and an output that follows it."""

    name: str
    schema: Json
    output: Json


WORKS = (
    Work(
        "tool call",
        {
            "type": "object",
            "properties": {
                "name": {"const": "get_weather"},
                "arguments": {
                    "type": "object",
                    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
                    "required": ["city", "unit"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
        {"name": "get_weather", "arguments": {"city": "San Francisco, California", "unit": "celsius"}},
    ),
    Work(
        "records",
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "integer", "minimum": 1},
                    "title": {"type": "string", "maxLength": 80},
                    "done": {"type": "boolean"},
                    "due": {"type": "string", "format": "date"},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
                },
                "required": ["id", "title", "done", "due"],
                "additionalProperties": False,
            },
        },
        [
            {"id": 17, "title": "Write the report on latencies", "done": False, "due": "2026-11-22", "tags": ["a"]},
            {"id": 18, "title": "Read it again", "done": True, "due": "2026-12-01"},
        ],
    ),
    Work(
        "free text",
        {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
        {"answer": "The decode node asks for the prompt, and the prefill node sends it layer by layer. " * 4},
    ),
    Work(
        "tree",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "number"},
                        "next": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
        },
        {"value": 1.5, "next": [{"value": 2, "next": []}, {"value": -3e4, "next": [{"value": 4, "next": []}]}]},
    ),
    Work(
        "500 names",
        {"type": "array", "items": {"enum": [f"value number {index}" for index in range(500)]}},
        ["value number 12", "value number 499", "value number 7"],
    ),
    Work(
        "patterns",
        {
            "type": "object",
            "properties": {
                "phone": {"type": "string", "pattern": "^\\+[0-9]{1,3} [0-9]{3}-[0-9]{4}$"},
                "code": {"type": "string", "pattern": "^([A-Z]{2,4}-?){1,4}[0-9]*$"},
            },
            "required": ["phone", "code"],
            "additionalProperties": False,
        },
        {"phone": "+49 555-1234", "code": "AB-CDEF-12345"},
    ),
    Work("any object", {"type": "object"}, {"a": [1, 2.5, None, True], "b": {"c": "a text of some words", "d": []}}),
)


@dataclass
class Times:
    """Seconds of one library on one schema, or on all."""

    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)

    def add(self, other: "Times") -> None:
        self.compile_s += other.compile_s
        self.mask_s += other.mask_s


def run(progress: Callable[[str], None]) -> Iterator[Row]:
    """The rows of this benchmark. With a GPU steps are those of Llama 3.1 8B, else those of the demo model."""
    with TemporaryDirectory() as folder:
        progress("structured: makes a tokenizer")
        path = Path(folder) / "tokenizer.json"
        tokenizer = wide_tokenizer(_VOCAB_SIZE)
        tokenizer.save(str(path))
        progress("structured: masks")
        yield from _masks(path, tokenizer, progress)
        yield from _batches(path, tokenizer)
        if not torch.cuda.is_available():
            progress("structured: the JSON-Schema-Test-Suite")
            yield from _refusals()
        progress("structured: steps")
        yield from _steps(path)


def wide_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of this many tokens: words of this repository, and compounds of two of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[_EOS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(pair) for pair in model["merges"]]
    words = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1]) if len(token) > 1 and token != _EOS]
    letters = [word for word in words if word.isascii() and word.isalpha()]
    for first, second in ((first, second) for second in letters for first in words[:512]):
        if len(vocab) == vocab_size:
            break
        if first + second not in vocab:
            vocab[first + second] = len(vocab)
            merges.append((first, second))
    wide = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    wide.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    wide.decoder = decoders.ByteLevel()
    wide.add_special_tokens([_EOS])
    return wide


def _texts() -> Iterator[str]:
    left = _TEXT_BYTES
    for folder in ("baton", "engine", "gateway", "models", "docs", "node", "kvtransfer", "tests"):
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md") and left > 0:
                text = path.read_text(encoding="utf-8")
                left -= len(text)
                yield text


class _Llguidance:
    """Baton's own compiler and matchers."""

    name = "llguidance"

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._tokenizer = path, tokenizer
        self._fill = MaskFiller().fill
        self.compiler = GrammarCompiler(path, tokenizer.get_vocab_size(), (tokenizer.get_vocab()[_EOS],))
        self.compiler.check(Grammar(GrammarKind.JSON_OBJECT))  # reads the tokenizer

    def times(self, work: Work) -> Times:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(work.schema))
        start_s = time.perf_counter()
        matcher = self.compiler.matcher(grammar)
        times = Times([time.perf_counter() - start_s])
        masks = np.empty((1, matcher.words), np.int32)
        for token_id in _tokens(self._tokenizer, work.output):
            start_s = time.perf_counter()
            (failed,) = self._fill([matcher], masks)
            times.mask_s.append(time.perf_counter() - start_s)
            assert failed is None
            matcher.consume(token_id)
        assert matcher.is_accepting
        return times

    def verdicts(self, schema: Json, instances: Sequence[Json]) -> list[bool] | None:
        """Which instances are accepted; None: the schema is refused."""
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        try:
            self.compiler.check(grammar)
        except InvalidRequest:
            return None
        return [self._accepts(grammar, instance) for instance in instances]

    def _accepts(self, grammar: Grammar, instance: Json) -> bool:
        matcher = self.compiler.matcher(grammar)
        try:
            for token_id in _tokens(self._tokenizer, instance):
                matcher.consume(token_id)
        except InvalidRequest:
            return False
        return matcher.is_accepting


class _XGrammar:
    """XGrammar with the whitespace of its default."""

    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        self._tokenizer = tokenizer
        vocab = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        info = xgrammar.TokenizerInfo(
            vocab,
            xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=len(vocab),
            stop_token_ids=[tokenizer.get_vocab()[_EOS]],
        )
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)

    def times(self, work: Work) -> Times:
        start_s = time.perf_counter()
        compiled = self._compiler.compile_json_schema(json.dumps(work.schema), strict_mode=False)
        matcher = self._library.GrammarMatcher(compiled)
        times = Times([time.perf_counter() - start_s])
        mask = self._library.allocate_token_bitmask(1, _VOCAB_SIZE)
        for token_id in _tokens(self._tokenizer, work.output):
            start_s = time.perf_counter()
            matcher.fill_next_token_bitmask(mask)
            times.mask_s.append(time.perf_counter() - start_s)
            assert matcher.accept_token(token_id)
        return times

    def verdicts(self, schema: Json, instances: Sequence[Json]) -> list[bool] | None:
        try:
            compiled = self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except Exception:  # noqa: BLE001  the library's own errors, and those of its C++
            return None
        verdicts = []
        for instance in instances:
            matcher = self._library.GrammarMatcher(compiled, terminate_without_stop_token=True)
            text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
            verdicts.append(bool(matcher.accept_string(text) and matcher.is_completed()))
        return verdicts


def _masks(path: Path, tokenizer: Tokenizer, progress: Callable[[str], None]) -> Iterator[Row]:
    if find_spec("xgrammar") is None:
        progress("structured: xgrammar is not installed, so nothing is compared with it")
        return
    ours, rival = _Llguidance(path, tokenizer), _XGrammar(tokenizer)
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


def _batches(path: Path, tokenizer: Tokenizer) -> Iterator[Row]:
    """Masks of 64 rows at once, each row at another place of its output."""
    ours = _Llguidance(path, tokenizer)
    matchers = []
    for row in range(_ROWS):
        work = WORKS[row % len(WORKS)]
        matcher = ours.compiler.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(work.schema)))
        ids = _tokens(tokenizer, work.output)
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


def _refusals() -> Iterator[Row]:
    """Schemas of the required keywords of draft 2020-12: refused ones, and wrong verdicts on others. With the small
    tokenizer of the demo models, because verdicts do not depend on it."""
    path = tokenizer_file(DEMO_MODELS / "llama")
    tokenizer = Tokenizer.from_file(str(path))
    counts = []
    for library in (_Llguidance(path, tokenizer), _XGrammar(tokenizer)):
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


def _steps(path: Path) -> Iterator[Row]:
    on_gpu = torch.cuda.is_available()
    name = "llama-3.1-8b" if on_gpu else "demo Llama"
    built = _built_on_gpu() if on_gpu else _built_on_cpu()
    if on_gpu:
        compiler = GrammarCompiler(path, _VOCAB_SIZE, (_EOS_ID,))
        built.runner.grammars = GrammarRows(compiler, built.cache.view.device)
    torch.set_num_threads(torch.get_num_threads() if on_gpu else 1)
    built.runner.prepare()
    context = _CONTEXT if on_gpu else 64
    drawn = [SamplingParams(temperature=1.0, seed=seed, max_tokens=1 << 20) for seed in range(_ROWS)]
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


def _built_on_gpu() -> Built:
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


def _built_on_cpu() -> Built:
    return build_runner(NodeSettings(model=DEMO_MODELS / "llama", device="cpu", num_blocks=1024))


def _row(name: str, work: str, ours: float, rivals: float, unit: str) -> Row:
    return Row(name, work, ours, unit, "xgrammar", rivals, less_is_better=True)


def _tokens(tokenizer: Tokenizer, output: Json) -> list[int]:
    text = json.dumps(output, ensure_ascii=False, separators=(",", ":"))
    return tokenizer.encode(text, add_special_tokens=False).ids


def _mean_us(times_s: Sequence[float]) -> float:
    return float(np.mean(times_s)) * 1e6


def _p99_us(times_s: Sequence[float]) -> float:
    return float(np.percentile(times_s, 99)) * 1e6


def _worst_us(times_s: Sequence[float]) -> float:
    return max(times_s) * 1e6
