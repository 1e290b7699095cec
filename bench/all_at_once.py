"""Output tokens per second of many simultaneous requests on one GPU: of the engine alone, and through a gateway and one
node with default settings.

The first workload is that of nano-vllm's own benchmark: Qwen3-8B's shape with random weights, 256 prompts and outputs
of 100 to 1,024 tokens, temperature 0.6. nano-vllm (GeeeekExplorer/nano-vllm, bb823b3) is measured too if it can be
imported, with its own defaults and random weights. The others have gpt-oss-120b's shape in mxfp4 and 1,024 tokens in
and out, through a gateway only.
"""

import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch

from baton.cli.processes import Processes
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.engine.build import build_runner
from baton.engine.calibration import calibrate
from baton.engine.engine import Engine
from baton.engine.events import StepEvents
from baton.engine.request import EngineLimits, EngineRequest
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import DecodeSettings
from bench.table import Row

GOAL = 1.25
_CONFIGS = Path(__file__).resolve().parent / "engine" / "configs"
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Load:
    """Requests that all come at the same time.

    Args:
        shortest, longest: of prompts and of outputs, in tokens.
        rounds: the best one counts, of the rival too.
    """

    requests: int
    shortest: int
    longest: int
    rounds: int

    @property
    def words(self) -> str:
        if self.shortest == self.longest:
            return f"{self.requests} requests of {self.longest} tokens in and out"
        return f"{self.requests} requests of {self.shortest}-{self.longest} tokens in and out"


NANO_VLLM = Load(requests=256, shortest=100, longest=1024, rounds=3)
GPT_OSS = tuple(Load(requests, shortest=1024, longest=1024, rounds=1) for requests in (256, 512))


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: tuple[int, ...]
    output_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0.6, max_tokens=self.output_tokens, ignore_eos=True)


def asks(load: Load, seed: int) -> list[Ask]:
    """The requests of a round; a seed of its own for each, so that no round finds the prefixes of another."""
    source = random.Random(seed)
    return [
        Ask(
            tuple(source.randint(0, 10_000) for _ in range(source.randint(load.shortest, load.longest))),
            source.randint(load.shortest, load.longest),
        )
        for _ in range(load.requests)
    ]


def run(progress: Callable[[str], None], parts: tuple[str, ...] = ("nano-vllm", "gpt-oss-120b")) -> Iterator[Row]:
    """The rows of this benchmark; none on a machine without a GPU."""
    if not torch.cuda.is_available():
        progress("all_at_once: needs a GPU")
        return
    if "nano-vllm" in parts:
        yield from _beside_nano_vllm(progress)
    if "gpt-oss-120b" in parts:
        yield from _of_gpt_oss(progress)


def _beside_nano_vllm(progress: Callable[[str], None]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        model = _write(Path(folder), json.loads((_CONFIGS / "qwen3-8b" / "config.json").read_text()))
        rival = None
        if find_spec("nanovllm") is None:
            progress("all_at_once: nano-vllm is not installed, the rival is missing")
        else:
            progress("all_at_once: nano-vllm")
            rival = _in_a_process(of_nano_vllm, model)
        for name, measure in (("engine alone", of_the_engine), ("through a gateway", of_a_gateway)):
            progress(f"all_at_once: {name}")
            rate = _in_a_process(measure, model)
            goal = None if rival is None else GOAL
            yield Row(name, NANO_VLLM.words, rate, "tokens/s", "nano-vllm", rival, goal=goal)


def _of_gpt_oss(progress: Callable[[str], None]) -> Iterator[Row]:
    """One node for all loads; each has prompts of its own."""
    values = json.loads((_CONFIGS / "gpt-oss-120b" / "config.json").read_text())
    with tempfile.TemporaryDirectory(prefix="baton-") as folder, Processes(progress) as processes:
        ask_all = _served(_write(Path(folder), values), processes)
        for load in GPT_OSS:
            progress(f"all_at_once: gpt-oss-120b, {load.words}")
            yield Row("gpt-oss-120b, through a gateway", load.words, _best(load, ask_all), "tokens/s")


def _write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    copyfile(DEMO_MODELS / "llama" / "tokenizer.json", folder / "tokenizer.json")
    return folder


def _in_a_process(measure: Callable[[Path], float], model: Path) -> float:
    """Its own process, whose memory on the GPU is free afterwards."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, model).result()


def _best(load: Load, seconds_of: Callable[[list[Ask]], float]) -> float:
    rates = []
    for seed in range(load.rounds):
        requests = asks(load, seed + load.requests)
        rates.append(sum(request.output_tokens for request in requests) / seconds_of(requests))
    print(f"bench: rounds {[round(rate) for rate in rates]}", flush=True)
    return max(rates)


def of_the_engine(model: Path) -> float:
    """Tokens per second of the engine of a node that decodes what it prefills."""
    settings = DecodeSettings(model=model, load_format="dummy", device="cuda:0")
    built = calibrate(build_runner(settings), settings)

    async def seconds_of(requests: list[Ask]) -> float:
        left, over = {str(index) for index in range(len(requests))}, asyncio.Event()

        def on_step(events: StepEvents) -> None:
            assert not events.failed
            left.difference_update(one.request_id for one in events.tokens if one.finish_reason is not None)
            if not left:
                over.set()

        limits = EngineLimits(
            max_batch_tokens=built.limits.max_batch_tokens,
            max_batch_requests=built.limits.max_batch_requests,
            max_waiting=len(requests),
            prefix_cache=True,
        )
        async with Engine(built.runner, limits, on_step=on_step, grammars=built.grammars) as engine:
            start_s = time.perf_counter()
            for index, request in enumerate(requests):
                engine.submit(EngineRequest(str(index), request.prompt, request.params.resolved()))
            async with asyncio.timeout(_TIMEOUT_S):
                await over.wait()
            return time.perf_counter() - start_s

    return _best(NANO_VLLM, lambda requests: asyncio.run(seconds_of(requests)))


def of_a_gateway(model: Path) -> float:
    """Tokens per second at a client of a gateway in front of one node."""
    with Processes(print) as processes:
        return _best(NANO_VLLM, _served(model, processes))


def _served(model: Path, processes: Processes) -> Callable[[list[Ask]], float]:
    """Starts a node and a gateway with default settings; returns what sends them requests and measures the seconds."""
    node = processes.start("decode_node", ["--model", str(model), "--load-format", "dummy", "--device", "cuda:0"])
    processes.wait_ready([node])
    gateway = processes.start("gateway", ["--model", str(model), "--decode", node.address])
    processes.wait_ready([gateway])

    async def seconds_of(requests: list[Ask]) -> float:
        async with AsyncClient(gateway.address) as client:

            async def one(request: Ask) -> None:
                tokens = 0
                async for answer in client.generate(request.prompt, request.params, timeout_s=_TIMEOUT_S):
                    tokens += len(getattr(answer, "tokens", ()))
                assert tokens == request.output_tokens

            start_s = time.perf_counter()
            await asyncio.gather(*(one(request) for request in requests))
            return time.perf_counter() - start_s

    return lambda requests: asyncio.run(seconds_of(requests))


def of_nano_vllm(model: Path) -> float:
    """Tokens per second of nano-vllm with its defaults. It has no random weights, so it gets them here."""
    from nanovllm import LLM  # type: ignore[import-not-found]
    from nanovllm import SamplingParams as Params
    from nanovllm.engine import model_runner  # type: ignore[import-not-found]

    def fill(module: Any, _path: str) -> None:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter.data, std=0.02)

    model_runner.load_model = fill
    llm = LLM(str(model), enforce_eager=False, max_model_len=4096)

    def seconds_of(requests: list[Ask]) -> float:
        params = [Params(temperature=0.6, ignore_eos=True, max_tokens=request.output_tokens) for request in requests]
        prompts = [list(request.prompt) for request in requests]
        start_s = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start_s

    llm.generate([[1] * 100], Params(ignore_eos=True, max_tokens=10), use_tqdm=False)
    return _best(NANO_VLLM, seconds_of)
