"""Executes the moves that `baton.gateway.request.balance` decides."""

import asyncio
import logging
from time import monotonic

from baton.core.errors import BatonError, InvalidRequest
from baton.gateway.request.balance import Balance, BalanceRules, Move, loads_of
from baton.gateway.request.connections import Connections
from baton.gateway.request.role_change import switch_role
from baton.rpc.convert import role_name

log = logging.getLogger("baton")

_LOOK_EVERY_S = 1.0


async def keep_balance(connections: Connections, rules: BalanceRules) -> None:
    """Balances the roles until it is cancelled."""
    balance, fixed = Balance(rules), set[int]()
    every_s = min(_LOOK_EVERY_S, max(rules.hold_s / 4, 0.01))
    while True:
        await asyncio.sleep(every_s)
        loads = loads_of(connections.fleet.nodes(), rules)
        move = balance.decide(loads, monotonic(), fixed=fixed)
        if move is None:
            continue
        try:
            await _make(connections, move, rules)
        except BatonError as error:
            log.warning("%s keeps its role: %s", move.address, error)
            balance.failed(monotonic())
            if isinstance(error, InvalidRequest) and error.field == "role":
                # The node's settings or certificate allow only one role until it is restarted.
                fixed |= {load.incarnation for load in loads if load.address == move.address}
        except Exception:  # a bug in our code must not end the gateway
            log.exception("%s was not moved", move.address)
            balance.failed(monotonic())


async def _make(connections: Connections, move: Move, rules: BalanceRules) -> None:
    log.info("balancing roles: %s becomes a %s node (%s)", move.address, role_name(move.role), move.reason)
    switching = switch_role(connections, move.address, move.role, grace_s=None, dwell_s=rules.cool_down_s)
    async for _ in switching:
        pass
