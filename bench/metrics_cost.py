"""CPU time of metrics: per token at the gateway, per step on a node, and per scrape. `python -m bench.metrics_cost`.

CPU time of this thread, the least of many rounds, so that other work on the machine does not count.
"""

import time
from collections.abc import Callable
from pathlib import Path

from baton.core.errors import NoNode
from baton.core.types import TokenOutput
from baton.engine.events import StepEvents, TokenSampled
from baton.gateway.core.shared_counters import SharedCounters
from baton.gateway.observe.meter import RequestMeter
from baton.metrics.exposition import Exposition
from baton.metrics.metric import Outcome, ProcessRole
from baton.node.meter import NodeMeter
from bench.machine import machine_and_date

PAGE = Path(__file__).resolve().parent / "results" / "metrics_cost.md"

_ROUNDS, _CALLS = 200, 500
_STEP_ROWS = 256

_TEXT = """# What metrics cost ({host})

`python -m bench.metrics_cost`, CPU time of one thread, the least of {rounds} rounds of {calls} calls.

| where | cost |
|---|---|
| gateway, per message to a client (one token or more) | {message:.2f} us |
| gateway, per request: its end, without log lines | {request:.1f} us |
| node, per step of {rows} decoding rows | {step:.2f} us, {share:.3f} % of a step of 5 ms |
| gateway, one scrape, in {pieces} pieces between which others run | {scrape:.1f} ms, longest piece {piece:.2f} ms |

A message of the gateway is one `observe` of the gap and one counter, in memory that all workers share. A step is one
`observe` and one counter, whatever the number of its rows.
"""


def main() -> None:
    counters = SharedCounters.create(4)[0]
    meter = RequestMeter(counters.tally)
    node = NodeMeter(ProcessRole.DECODE)
    tokens = tuple(TokenSampled(str(row), TokenOutput(1, 0), None, "") for row in range(_STEP_ROWS))
    events = StepEvents(1, 0.01, tokens=tokens)
    step_us = _cost_us(lambda: node.step(events))
    times_ms = _scrape_ms(counters)
    text = _TEXT.format(
        host=machine_and_date(),
        rounds=_ROUNDS,
        calls=_CALLS,
        message=_cost_us(lambda: meter.next(0.012, 1)),
        request=_cost_us(lambda: meter.ended(Outcome.FAILED, 1.0, NoNode("x"))),
        rows=_STEP_ROWS,
        step=step_us,
        share=step_us / 5e3 * 100,
        pieces=len(times_ms),
        scrape=sum(times_ms),
        piece=max(times_ms),
    )
    PAGE.write_text(text)
    print(text)


def _cost_us(call: Callable[[], None]) -> float:
    return min(_round_us(call) for _ in range(_ROUNDS))


def _round_us(call: Callable[[], None]) -> float:
    began = time.thread_time()
    for _ in range(_CALLS):
        call()
    return (time.thread_time() - began) / _CALLS * 1e6


def _scrape_ms(counters: SharedCounters) -> list[float]:
    """The time of each piece of the gateway's page, of the fastest of some scrapes."""
    exposition = Exposition(ProcessRole.GATEWAY, counters.layout, "model")
    found = []
    for _ in range(20):
        pieces, took = exposition.pages(counters.totals(), []), []
        while True:
            began = time.thread_time()
            if next(pieces, None) is None:
                break
            took.append((time.thread_time() - began) * 1e3)
        found.append(took)
    return min(found, key=sum)


if __name__ == "__main__":
    main()
