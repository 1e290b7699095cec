"""Plans a run: which request is sent when, with how many tokens and which shared prefixes. Pure and seeded."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from baton.core.errors import InvalidRequest
from baton.load.arrivals import Arrivals, arrival_times
from baton.load.lengths import Lengths, Lognormal, Uniform
from baton.load.traces import TraceRequest

_SESSION_BLOCK_TOKENS = 16  # prompts of a session share prefixes of whole blocks
_SESSION_BLOCKS_MAX = 1 << 16


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a plan.

    Args:
        at_s: when it is sent, after the start of the run.
        prefix_ids, prefix_tokens: as in `TraceRequest`.
        session: equal for the requests of one conversation; -1: none.
        counted: whether it counts, as warm-up requests do not.
    """

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_tokens: int = 0
    session: int = -1
    counted: bool = True


@dataclass(frozen=True)
class LengthSpan:
    """How long a run sends: until `requests` counted ones, or for `duration_s`, after a warm-up that does not count."""

    duration_s: float | None = None
    requests: int | None = None
    warmup_s: float = 0.0

    def __post_init__(self) -> None:
        if self.duration_s is None and self.requests is None:
            raise InvalidRequest("a run without end", field="duration", cure="give a duration or a number of requests")

    def cut(self, planned: Iterator[PlannedRequest]) -> list[PlannedRequest]:
        """The requests of the run, numbered; those of the warm-up are not counted."""
        end_s = float("inf") if self.duration_s is None else self.warmup_s + self.duration_s
        kept, counted = list[PlannedRequest](), 0
        for request in takewhile(lambda each: each.at_s < end_s, planned):
            if self.requests is not None and counted == self.requests:
                break
            counts = request.at_s >= self.warmup_s
            counted += counts
            kept.append(replace(request, index=len(kept), counted=counts))
        if not counted:
            raise InvalidRequest(
                "the run would send no request",
                field="duration",
                cure="allow more time, a higher rate or more requests",
            )
        return kept


@dataclass(frozen=True)
class Synthetic:
    """Requests whose times and lengths are drawn.

    Args:
        shared_prefix_tokens: number of first tokens of each prompt that are one of `shared_prefixes` texts; they are
            part of the prompt's length.
        sessions: number of conversations that take turns. Each prompt continues the last one of its conversation by the
            drawn number of tokens. A conversation that would exceed `session_tokens` starts again.
        tokens_max: most tokens of a request's prompt and output together.
    """

    prompts: Lengths
    outputs: Lengths
    arrivals: Arrivals = Arrivals.POISSON
    burstiness: float = 1.0
    shared_prefix_tokens: int = 0
    shared_prefixes: int = 1
    sessions: int = 0
    session_tokens: int = 8192
    tokens_max: int | None = None

    def __post_init__(self) -> None:
        if self.sessions and self.shared_prefix_tokens:
            raise InvalidRequest(
                "sessions and shared prefixes exclude each other",
                field="sessions",
                value=self.sessions,
                cure="give one",
            )

    def plan(self, rate: float, span: LengthSpan, seed: int) -> list[PlannedRequest]:
        """The requests of one run; equal arguments give equal plans.

        Raises:
            InvalidRequest: no request would be sent, or none fits into `tokens_max`.
        """
        # Times and lengths have separate generators: with the same seed, another rate has the same lengths, and other
        # lengths have the same times.
        times = arrival_times(self.arrivals, rate, random.Random(f"times {seed}"), burstiness=self.burstiness)
        rng = random.Random(f"lengths {seed}")
        return span.cut(self._sessions(times, rng) if self.sessions else self._requests(times, rng))

    def _requests(self, times: Iterator[float], rng: random.Random) -> Iterator[PlannedRequest]:
        shared = self.shared_prefix_tokens
        for at_s in times:
            prompt, output = self._draw(rng)
            if shared:
                which = rng.randrange(self.shared_prefixes)
                yield PlannedRequest(0, at_s, max(prompt, shared), output, (which,), shared)
            else:
                yield PlannedRequest(0, at_s, prompt, output)

    def _sessions(self, times: Iterator[float], rng: random.Random) -> Iterator[PlannedRequest]:
        """The requests of sessions. Whole blocks of a prompt stay in its session; the rest differs from turn to
        turn."""
        block = _SESSION_BLOCK_TOKENS
        states = [(number, 0) for number in range(self.sessions)]  # number of the session, its tokens so far
        started = self.sessions
        for at_s in times:
            place = rng.randrange(self.sessions)
            number, before = states[place]
            prompt, output = self._draw(rng)
            total = before + prompt
            limit = (
                self.session_tokens if self.tokens_max is None else min(self.session_tokens, self.tokens_max - output)
            )
            if before and total > limit:
                number, started, total = started, started + 1, prompt
            states[place] = (number, total // block * block)
            first = number * _SESSION_BLOCKS_MAX
            yield PlannedRequest(
                0, at_s, total, output, tuple(range(first, first + total // block)), block, session=number
            )

    def _draw(self, rng: random.Random) -> tuple[int, int]:
        for _ in range(1000):
            prompt, output = self.prompts.draw(rng), self.outputs.draw(rng)
            if self.tokens_max is None or max(prompt, self.shared_prefix_tokens) + output <= self.tokens_max:
                return prompt, output
        raise InvalidRequest(
            f"no lengths of {self.prompts} in and {self.outputs} out fit into {self.tokens_max} tokens",
            field="lengths", cure="ask for shorter ones",
        )  # fmt: skip


@dataclass(frozen=True)
class TraceReplay:
    """The requests of a trace, at scaled times.

    Args:
        tokens_max: longer requests are left out.
    """

    trace: Sequence[TraceRequest]
    tokens_max: int | None = None

    @property
    def left_out(self) -> int:
        return sum(not self._fits(request) for request in self.trace)

    @property
    def rate(self) -> float:
        """The recorded rate of the requests that fit, per second."""
        fit = sum(map(self._fits, self.trace))
        return fit / max(self.trace[-1].at_s, 1e-3)

    def plan(self, rate: float, span: LengthSpan, seed: int) -> list[PlannedRequest]:  # noqa: ARG002 - a trace is not drawn
        """The requests of one run. Times are scaled so that the whole trace has the mean rate `rate`.

        Raises:
            InvalidRequest: no request fits, or none is within the span.
        """
        fit = [request for request in self.trace if self._fits(request)]
        if not fit:
            raise InvalidRequest(f"no request of the trace fits into {self.tokens_max} tokens", field="trace")
        scale = self.rate / rate
        return span.cut(
            PlannedRequest(
                0,
                scale * request.at_s,
                request.prompt_tokens,
                max(1, request.output_tokens),
                request.prefix_ids,
                request.prefix_tokens,
            )
            for request in fit
        )

    def _fits(self, request: TraceRequest) -> bool:
        return self.tokens_max is None or request.prompt_tokens + request.output_tokens <= self.tokens_max


Workload = Synthetic | TraceReplay

# The loads by which goodput is measured, and which the pages show.
PRESETS: dict[str, tuple[Lengths, Lengths]] = {
    "chat": (Lognormal(250, 0.6), Lognormal(200, 0.6)),
    "long": (Uniform(4096, 8192), Uniform(128, 256)),
}
