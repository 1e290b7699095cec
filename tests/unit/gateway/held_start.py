"""A hand-over whose first token waits at the gateway, on nodes with steps of 5 ms."""

from dataclasses import replace

from baton.core.errors import NoNode
from baton.core.types import DEFAULT_OBJECTIVE, NO_SLO, LocalPolicy, Objective, Slo
from baton.gateway.core.events import Started
from baton.gateway.core.request import Request
from baton.gateway.fleet.second_token import SecondTokenDelay
from baton.gateway.request.commands import Command, Respond
from baton.gateway.request.machine import RequestMachine
from tests.unit.gateway.fleets import DECODE, request, rules, status
from tests.unit.gateway.served import (
    PROGRESS,
    SCHEDULED,
    Served,
    Words,
    first_token,
    of,
    reserved,
)

GONE = NoNode("connection refused")
STEP_S = 0.005
GAP_S = DEFAULT_OBJECTIVE.gap_factor * STEP_S
CAME_S = 0.02  # from the request's arrival


def taught(delay_s: float) -> SecondTokenDelay:
    delay = SecondTokenDelay()
    for _ in range(400):
        delay.add(delay_s, 0.0)
    return delay


def called(
    *,
    delay_s: float = 0.0175,
    slo: Slo = NO_SLO,
    objective: Objective = DEFAULT_OBJECTIVE,
    asked: Request | None = None,
    knows_costs: bool = True,
    policy: LocalPolicy = LocalPolicy.PREFER,
) -> Served:
    """A request whose prompt a prefill node computes for a node with steps of 5 ms."""
    served = Served(start=False, policy=policy)
    served.machine = RequestMachine(
        replace(asked or request(), slo=slo), replace(rules(policy), objective=objective), served.fleet, Words()
    )
    for number in (1, 2):
        reported = status(DECODE, 20 + number)
        if knows_costs:
            reported.step_costs.points.add(tokens=64, seconds=STEP_S)
        served.fleet.status_received(DECODE, f"d{number}", reported, 0.0)
        served.fleet.decodes[f"d{number}"].second_token = taught(delay_s)
    if asked is not None and asked.output:
        served.machine.resume()
    served.handle(Started())
    served.decode(reserved())
    served.prefill(SCHEDULED, PROGRESS)
    return served


def held(**how: object) -> Served:
    """A request whose first token waits."""
    served = called(**how)  # type: ignore[arg-type]
    assert served.prefill(first_token(), after_s=CAME_S) == []
    return served


def learned_s(served: Served) -> float:
    return served.fleet.decodes["d1"].second_token.at(served.now_s)


def tokens_of(commands: list[Command]) -> list[list[int]]:
    return [[each.token_id for each in command.message.tokens] for command in of(commands, Respond)]
