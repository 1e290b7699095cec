"""Time per token of an engine with and without draft tokens, on recorded outputs.

The weights are random, in the shapes of published models on a GPU and of the demo model on a CPU, so what they draw is
replaced by the tokens of real texts: files of this repository that are repeated with edits, files unlike the prompt,
records of one form, tool calls that quote the prompt, and edits next to files unlike the prompt. Steps compute and cost
what they always do.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from statistics import median

import torch
from tokenizers import Tokenizer

from baton.core.sampling import ResolvedSampling
from baton.core.types import PromptLogprob, TokenOutput
from baton.engine.batch import Batch, BatchRow, LayerDrafts, RowResult
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.calibration import calibrate
from baton.engine.device.device_thread import LaunchedWork, StepRunner
from baton.engine.device.layer_marks import OnMark
from baton.engine.engine import Engine
from baton.engine.events import DraftsChecked, StepEvents
from baton.engine.pooling import PooledRows
from baton.engine.request import EngineLimits, EngineRequest, ModelFacts
from baton.engine.speculation.speculator import Speculator
from baton.engine.step_meter import StepMeter
from baton.models.adapters.adapter import Adapter
from baton.models.layers.expert_counts import FetchedCounts
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import DecodeSettings
from bench.engine.run import CONFIGS, forget
from bench.table import Row

# The second one has recurrent states. Others of `CONFIGS` can be named: `python -m bench.engine.drafts NAME`.
MODELS = ("llama-3.1-8b", "nemotron-h-8b")
BATCHES = (1, 8, 32, 128)
ROUNDS = 3
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 192
_GOALS = {("edited files", 1): 1.8, ("edited files", 32): 1.3, ("unlike files", 128): 0.98}
_TIMEOUT_S = 600.0
_ROOT = Path(__file__).resolve().parents[2]
_EDITED_SHARE = 0.05  # of the lines
_CALLS = 8  # of a tool, more than an output takes
_APART = 5  # files between those of a pair of requests


@dataclass(frozen=True)
class Recorded:
    """One request: its prompt, and the tokens that it is answered."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


class RecordedRunner:
    """Runs steps like the runner in it, and yields the recorded tokens instead of the drawn ones.

    Args:
        outputs: the recorded tokens by request, which may change between steps.
    """

    def __init__(self, runner: StepRunner, outputs: Mapping[str, Sequence[int]]) -> None:
        self._runner = runner
        self._outputs = outputs

    @property
    def facts(self) -> ModelFacts:
        return self._runner.facts

    def prepare(self) -> None:
        self._runner.prepare()

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        self._runner.load_adapter(slot, adapter)

    def fetch_expert_counts(self) -> FetchedCounts | None:
        return self._runner.fetch_expert_counts()

    def launch(self, batch: Batch, on_mark: OnMark) -> "RecordedStep":
        results = [self._result(row) for row in batch.rows]
        return RecordedStep(self._runner.launch(batch, on_mark), results)

    def _result(self, row: BatchRow) -> RowResult:
        if row.sample is None:
            return None
        first = row.sample.output_index
        output = self._outputs[row.request_id]
        kept: list[TokenOutput] = []
        for index, draft in enumerate((*row.drafts, None), start=first):
            kept.append(TokenOutput(output[index], index))
            if output[index] != draft:
                break
        return tuple(kept) if row.num_drafts else kept[0]


class RecordedStep:
    """A step that runs as it is, and its recorded results."""

    def __init__(self, step: LaunchedWork, results: list[RowResult]) -> None:
        self.step = step
        self.results = results

    def wait(self) -> list[RowResult]:
        self.step.wait()
        return self.results

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def scores(self) -> Mapping[int, Sequence[PromptLogprob]]:
        return self.step.scores

    @property
    def pools(self) -> PooledRows:
        return self.step.pools

    @property
    def layer_drafts(self) -> LayerDrafts | None:
        return self.step.layer_drafts

    @property
    def shares_keys(self) -> bool:
        return self.step.shares_keys


def run(progress: Callable[[str], None], names: tuple[str, ...] = MODELS) -> Iterator[Row]:
    """The rows of this benchmark."""
    on_gpu = torch.cuda.is_available()
    for model in [CONFIGS / name for name in names] if on_gpu else [DEMO_MODELS / "llama"]:
        settings = DecodeSettings(model=model, load_format="dummy", device="cuda" if on_gpu else "cpu")
        built = calibrate(build_runner(settings), settings)
        about = "" if len(names) == 1 or not on_gpu else f"{model.name}, "
        yield from _measure(built, BATCHES if on_gpu else BATCHES[:2], about, progress)
        del built
        if on_gpu:
            forget()


def _measure(built: BuiltRunner, batches: Sequence[int], about: str, progress: Callable[[str], None]) -> Iterator[Row]:
    for name, requests in recorded().items():
        for batch in batches:
            measured: dict[bool, list[float]] = {False: [], True: []}
            # As on a node, what is learned in one round is known in the next.
            speculator, meters = Speculator(), {speculates: StepMeter(built.costs) for speculates in measured}
            checked: list[DraftsChecked] = []
            for number in range(ROUNDS):
                asked = [requests[(number * batch + index) % len(requests)] for index in range(batch)]
                for speculates in (False, True) if number % 2 == 0 else (True, False):
                    setting = "auto" if speculates else "off"
                    progress(f"drafts {setting}: {about}{name}, batch {batch}, round {number + 1}")
                    used = speculator if speculates else None
                    took_ms = asyncio.run(token_ms(built, asked, used, checked, meter=meters[speculates]))
                    measured[speculates].append(took_ms)
            yield from _rows(name, about, batch, measured, checked)


def _rows(
    name: str, about: str, batch: int, measured: Mapping[bool, Sequence[float]], checked: Sequence[DraftsChecked]
) -> Iterator[Row]:
    work = f"{about}{name}, batch {batch}"
    off_ms, auto_ms = median(measured[False]), median(measured[True])
    goal = _GOALS.get((name, batch))
    yield Row("time per token", work, auto_ms, "ms", "off", off_ms, goal=goal, less_is_better=True)
    drafted, accepted = sum(each.drafted for each in checked), sum(each.accepted for each in checked)
    yield Row("draft tokens accepted", work, 100 * accepted / max(1, drafted), "%")


async def token_ms(
    built: BuiltRunner,
    requests: Sequence[Recorded],
    speculator: Speculator | None,
    checked: list[DraftsChecked],
    *,
    meter: StepMeter | None = None,
    wrap: Callable[[StepRunner, Mapping[str, Sequence[int]]], RecordedRunner] | None = None,
) -> float:
    """The mean time per token. Prompts are in the cache before, so that all requests decode at the same time. Adds the
    drafts to `checked`.

    Args:
        speculator: forgets the outputs of earlier calls, which would be drafted too well, but not what it has learned.
        meter: knows the costs of steps; None: one that knows only what the profile measured.
        wrap: makes the runner that yields the recorded tokens; None: `RecordedRunner`.
    """
    outputs = {str(index): each.output for index, each in enumerate(requests)}
    left, over = set[str](), asyncio.Event()

    def on_step(events: StepEvents) -> None:
        assert not events.failed, events.failed
        checked.extend(events.drafts)
        left.difference_update(each.request_id for each in events.tokens if each.finish_reason is not None)
        if not left:
            over.set()

    async def answer(engine: Engine, asked: Mapping[str, EngineRequest]) -> float:
        left.update(asked)
        over.clear()
        started_s = time.perf_counter()
        for request in asked.values():
            engine.submit(request)
        async with asyncio.timeout(_TIMEOUT_S):
            await over.wait()
        return time.perf_counter() - started_s

    def asked(most: int | None = None) -> dict[str, EngineRequest]:
        return {
            str(index): EngineRequest(
                str(index),
                each.prompt,
                ResolvedSampling(max_tokens=most or len(each.output), temperature=0.0, ignore_eos=True),
            )
            for index, each in enumerate(requests)
        }

    limits = EngineLimits(
        max_batch_tokens=built.limits.max_batch_tokens,
        max_batch_requests=built.limits.max_batch_requests,
        max_waiting=len(requests),
        prefix_cache=True,
    )
    runner = (wrap or RecordedRunner)(built.runner, outputs)
    async with Engine(
        runner,
        limits,
        on_step=on_step,
        grammars=built.grammars,
        meter=meter or StepMeter(built.costs),
        speculator=speculator,
    ) as engine:
        await answer(engine, asked(1))
        seconds = await answer(engine, asked())
        await engine.drop_prefixes("", ())
    return 1e3 * seconds / OUTPUT_TOKENS


def recorded() -> dict[str, list[Recorded]]:
    """Requests by the kind of their outputs."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODELS / "llama" / "tokenizer.json"))

    def tokens(text: str, count: int) -> tuple[int, ...]:
        return tuple(islice(tokenizer.encode(text, add_special_tokens=False).ids, count))

    def request(prompt: str, output: str) -> Recorded | None:
        made = Recorded(tokens(prompt, PROMPT_TOKENS), tokens(output, OUTPUT_TOKENS))
        return made if len(made.output) == OUTPUT_TOKENS else None

    chosen = Random(7)
    texts = [path.read_text() for path in sorted((_ROOT / "baton").glob("*/*.py")) if path.stat().st_size > 3000]
    pairs = zip(texts, [*texts[1:], texts[0]], strict=True)
    records = [_record(chosen) for _ in range(8 * len(texts))]
    found = {
        "edited files": [request(text, _edited(text, chosen)) for text in texts],
        "unlike files": [request(text, other) for text, other in pairs],
        "records of one form": [request(text, "\n".join(records[8 * n :][:8])) for n, text in enumerate(texts)],
        "tool calls": [request(text, _tool_calls(text, chosen)) for text in texts],
    }
    kinds = {name: [each for each in requests if each is not None] for name, requests in found.items()}
    # Not the same files next to each other.
    pairs_of_kinds = zip(kinds["edited files"], kinds["unlike files"][_APART:], strict=False)
    return kinds | {"half edited": [each for pair in pairs_of_kinds for each in pair]}


def _edited(text: str, chosen: Random) -> str:
    """The text with a name changed, and some lines left out or changed."""
    lines = []
    for line in text.replace("self", "this").splitlines():
        kind = chosen.random()
        if kind < _EDITED_SHARE / 2:
            continue
        lines.append(line + "  # checked" if kind < _EDITED_SHARE else line)
    return "\n".join(lines)


def _tool_calls(text: str, chosen: Random) -> str:
    """What an agent answers that changes a file by calls of a tool: each call quotes some lines and says what they
    become."""
    lines = text.splitlines()
    calls = list[str]()
    while len(calls) < _CALLS:
        start = chosen.randrange(max(1, len(lines) // 2))
        old = "\n".join(lines[start : start + chosen.randrange(3, 8)])
        arguments = {"path": lines[0][:40], "old_text": old, "new_text": _edited(old, chosen)}
        calls.append(json.dumps({"name": "replace_lines", "arguments": arguments}))
    return "\n".join(calls)


def _record(chosen: Random) -> str:
    fields = {
        "order_number": chosen.randrange(10**6),
        "customer_name": chosen.choice(("Ada Byron", "Grace Hopper", "Edsger Dijkstra", "Barbara Liskov")),
        "is_paid": chosen.random() < 0.5,
        "delivery_address": {"street": f"{chosen.randrange(200)} Long Street", "postal_code": chosen.randrange(10**5)},
    }
    return json.dumps(fields, indent=2)


if __name__ == "__main__":
    import sys

    from bench.table import print_rows

    print_rows("Speculative decoding on recorded outputs", list(run(print, tuple(sys.argv[1:]) or MODELS)))
