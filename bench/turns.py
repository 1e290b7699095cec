"""Conversations that go on with the server's own answers: TTFT of each turn, and how much of it was computed again.

`python -m bench.turns GATEWAY` plays `agents`, 40 turns up to 126,000 tokens, or with `--load documents` 6 questions
about each of 128 documents of 48,000 tokens; the other flags scale them. It is a closed loop: `--at-once` sessions wait
for an answer at a time, and the next turn of each comes after those of all others. So sessions displace each other's
KV where the cache has too little room for all.
"""

import argparse
import asyncio
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.client.client import AsyncClient
from baton.client.outputs import Finished
from baton.core.sampling import SamplingParams

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Script:
    """What each session says.

    Attributes:
        document: tokens that the first prompt has more than the others add.
        question: new tokens of each turn.
        answer: tokens that the server answers with.
        tokens: questions and documents are random token ids below this number.
    """

    sessions: int
    turns: int
    document: int
    question: int
    answer: int
    tokens: int = 2000


LOADS = {
    "agents": Script(sessions=12, turns=40, document=8000, question=2500, answer=444),
    "documents": Script(sessions=128, turns=6, document=48_000, question=128, answer=128),
}


@dataclass
class _Session:
    generator: random.Random
    said: list[int] = field(default_factory=list)
    turns: int = 0


@dataclass(frozen=True)
class Turn:
    """One answered turn.

    Attributes:
        number: from 1.
        earlier: tokens of the earlier turns, answers included.
        reused: of all tokens of the prompt, those that were not computed again.
        loaded: of these, those that came from outside of the cache.
    """

    number: int
    prompt: int
    earlier: int
    reused: int
    loaded: int
    ttft_s: float


async def play(gateway: str, script: Script, *, at_once: int, seed: int = 0) -> list[Turn]:
    """Plays all sessions, which take turns."""
    waiting = deque(_Session(random.Random(f"{seed} {number}")) for number in range(script.sessions))
    turns: list[Turn] = []
    async with AsyncClient(gateway) as client:

        async def talk() -> None:
            while waiting:
                session = waiting.popleft()
                turns.append(await _say(client, session, script))
                if session.turns < script.turns:
                    waiting.append(session)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(talk())
    return turns


async def _say(client: AsyncClient, session: _Session, script: Script) -> Turn:
    earlier = len(session.said)
    new = script.question + (script.document if not earlier else 0)
    session.said += [session.generator.randrange(10, script.tokens) for _ in range(new)]
    session.turns += 1
    prompt = len(session.said)
    params = SamplingParams(max_tokens=script.answer, temperature=0.0, ignore_eos=True)
    begun_s, ttft_s = time.perf_counter(), None
    answer: list[int] = []
    async for event in client.generate(tuple(session.said), params, timeout_s=_TIMEOUT_S):
        if event.tokens and ttft_s is None:
            ttft_s = time.perf_counter() - begun_s
        answer += [token.token_id for token in event.tokens]
        if isinstance(event, Finished):
            receipt = event.receipt
    assert ttft_s is not None
    session.said += answer
    by_prefill = bool(receipt.prefill_node)
    reused = receipt.prefill_cached_tokens if by_prefill else receipt.decode_cached_tokens
    loaded = receipt.prefill_loaded_tokens if by_prefill else receipt.decode_loaded_tokens
    return Turn(session.turns, prompt, earlier, reused, loaded, ttft_s)


def table(turns: Sequence[Turn]) -> Iterator[str]:
    """The lines of a table in Markdown, and a sentence."""
    yield "| turn | prompts | tokens, mean | TTFT p50, ms | TTFT p99, ms | earlier tokens not computed again | loaded |"
    yield "|---" * 7 + "|"
    for number in sorted({turn.number for turn in turns}):
        part = [turn for turn in turns if turn.number == number]
        p50, p99 = 1e3 * np.percentile([turn.ttft_s for turn in part], (50, 99))
        tokens = sum(turn.prompt for turn in part) / len(part)
        loaded = sum(turn.loaded for turn in part)
        share = _kept_share(part)
        shown = "" if share is None else f"{100 * share:.1f} %"
        yield f"| {number} | {len(part)} | {tokens:,.0f} | {p50:.0f} | {p99:.0f} | {shown} | {loaded:,} |"
    share = _kept_share(turns)
    if share is not None:
        yield ""
        yield f"{100 * share:.2f} % of earlier tokens were not computed again."


def _kept_share(turns: Sequence[Turn]) -> float | None:
    earlier = sum(turn.earlier for turn in turns)
    return sum(min(turn.reused, turn.earlier) for turn in turns) / earlier if earlier else None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.turns", description="Plays conversations, turn by turn.")
    parser.add_argument("gateway", help="host:port of a gateway (gRPC)")
    parser.add_argument("--load", choices=LOADS, default="agents")
    for name in ("sessions", "turns", "document", "question", "answer", "tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    values = vars(LOADS[given["load"]])
    script = Script(**{name: values[name] if given[name] is None else given[name] for name in values})
    begun_s = time.perf_counter()
    turns = asyncio.run(play(given["gateway"], script, at_once=given["at_once"], seed=given["seed"]))
    print("\n".join(table(turns)))
    print(f"{len(turns)} turns in {time.perf_counter() - begun_s:.1f} s")


if __name__ == "__main__":
    main()
