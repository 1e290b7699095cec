"""A decoding request with a known output, as the scheduler would have it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core.costs import StepCosts, StepWork
from baton.core.types import Grammar
from baton.engine.request import IntArray, int_array
from baton.engine.speculation.allowance import Allowance
from baton.engine.speculation.depth import speculative_work
from baton.engine.speculation.speculative_times import EndedStep
from baton.engine.speculation.speculator import Speculator

# Weights are read in 10 ms, and steps are as fast with 64 tokens.
COSTS = StepCosts(((1, 0.010), (64, 0.010), (512, 0.050)), key_s=1e-8, pair_s=1e-9, decode_row_s=1e-6)
ROOT = b"root"


@dataclass
class DecodingRequest:
    """Decodes `target` after its prompt."""

    request_id: str
    prompt: Sequence[int]
    target: Sequence[int]
    tokens: IntArray = field(init=False)
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.tokens = int_array([*self.prompt, *self.target[:1]])

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def most_drafts(self) -> int:
        return max(0, len(self.target) - (len(self.tokens) - len(self.prompt)) - 1)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) - len(self.prompt) >= len(self.target)

    def take(self, draft: Sequence[int]) -> None:
        """Adds the tokens of a step with this draft."""
        at = len(self.tokens) - len(self.prompt)
        accepted = 0
        while accepted < len(draft) and draft[accepted] == self.target[at + accepted]:
            accepted += 1
        self.tokens.extend(self.target[at : at + accepted + 1])
        self.drafted += len(draft)
        self.accepted += accepted


def plenty() -> Allowance:
    """An allowance that no test uses up."""
    return Allowance(10**9)


def work_of(requests: Sequence[DecodingRequest]) -> StepWork:
    return StepWork(len(requests), sum(len(request.tokens) for request in requests))


def teach_waits(speculator: Speculator, decode_rows: int, wait_s: float, costs: StepCosts = COSTS) -> None:
    """Lets steps with any number of accepted drafts take so much longer than the cost model says."""
    plain = StepWork(decode_rows, 1000 * decode_rows)
    for drafts in (1, 4, 16) * 11:
        work = speculative_work(plain, [(1000, drafts)])
        speculator.ended(EndedStep(plain, work, work.decode_rows, costs.seconds(work), wait_s, late=True), costs)


def decode(
    speculator: Speculator,
    request: DecodingRequest,
    *,
    root: bytes = ROOT,
    grammar: Grammar | None = None,
    costs: StepCosts | None = COSTS,
    room: int = 64,
) -> int:
    """Decodes a request alone. Returns the number of steps."""
    speculator.begin(request, root=root, grammar=grammar)
    steps = 0
    while not request.is_done:
        work = work_of([request])
        speculator.pays([request], work, costs)
        draft = speculator.choose([request], work, costs, room=room).get(request.request_id, ())
        assert len(draft) <= min(room, request.most_drafts)
        request.take(draft)
        steps += 1
    speculator.end(request)
    return steps
