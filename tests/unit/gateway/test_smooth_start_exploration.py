"""First tokens of hand-overs wait, while nodes answer in any order and fail at any point: no token is lost by that."""

from hypothesis import given, settings

from baton.core.types import LocalPolicy, Slo
from baton.gateway.request.commands import Command
from tests.unit.gateway.held_start import taught
from tests.unit.gateway.test_request_exploration import FAULTS, ORDERLY, World, steps_of

MOMENTS = ["a moment passes"] * 4


class HoldingWorld(World):
    """A world whose first tokens wait, wherever nothing else happens."""

    def __init__(self, policy: LocalPolicy, *, also_decode: bool) -> None:
        super().__init__(policy, also_decode=also_decode, slo=Slo(tpot_s=0.001))

    def obey(self, command: Command) -> None:
        for node in self.served.fleet.decodes.values():
            node.second_token = taught(0.04)
        super().obey(command)

    def step(self, action: str, which: int) -> None:
        if action == "a moment passes":
            self.pass_time(0.002 * which)
        else:
            super().step(action, which)


@settings(max_examples=200, deadline=None)
@given(steps=steps_of(ORDERLY + FAULTS + MOMENTS))
def test_no_token_is_lost_doubled_or_reordered_by_a_wait(steps: list[tuple[str, int]]) -> None:
    for policy in (LocalPolicy.PREFER, LocalPolicy.STRICT):
        world = HoldingWorld(policy, also_decode=True)
        for action, which in steps:
            if world.live:
                world.step(action, which)
        world.finish()


@settings(max_examples=100, deadline=None)
@given(steps=steps_of(ORDERLY + MOMENTS))
def test_without_faults_a_wait_changes_no_token(steps: list[tuple[str, int]]) -> None:
    world = HoldingWorld(LocalPolicy.PREFER, also_decode=False)
    for action, which in steps:
        if world.live:
            world.step(action, which)
    world.finish()
    assert world.served.error is None


def test_the_worlds_first_tokens_do_wait() -> None:
    world = HoldingWorld(LocalPolicy.STRICT, also_decode=False)
    for action in ["decode node sends", *["prefill node sends"] * 3]:
        world.step(action, 0)
    assert world.served.machine.completion_tokens == 1
    assert world.served.token_ids == []
    world.step("a moment passes", 30)
    assert world.served.token_ids == [100]
