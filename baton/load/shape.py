"""The flags that describe what is sent (lengths or a trace, arrivals, prefixes), and the workload that they make."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import InvalidRequest
from baton.load.arrivals import Arrivals
from baton.load.lengths import Lengths, parse_lengths
from baton.load.target import Server
from baton.load.traces import read_trace
from baton.load.workload import PRESETS, Synthetic, TraceReplay, Workload

DEFAULT_RATE = 1.0


@dataclass(frozen=True)
class Shape:
    """The flags as given; None: not given."""

    preset: str
    prompts: str | None
    outputs: str | None
    trace: Path | None
    shared_prefix: int
    shared_prefixes: int
    sessions: int
    tokens_max: int | None
    arrivals: Arrivals
    burstiness: float
    rate: float | None
    speed: float | None

    def check(self) -> None:
        """Checks the flags before anything is started.

        Raises:
            InvalidRequest: values are not known, or exclude each other.
        """
        self._lengths()
        if self.trace is not None and not self.trace.is_file():
            raise InvalidRequest(f"there is no trace {self.trace}", field="trace", value=self.trace)
        with_trace = {"--input": self.prompts, "--output": self.outputs, "--shared-prefix": self.shared_prefix,
                      "--sessions": self.sessions}  # fmt: skip
        excluded = [name for name, value in with_trace.items() if value]
        if self.trace is not None and excluded:
            raise InvalidRequest(f"a trace has its own {' and '.join(excluded)}", field="trace", cure="leave one out")
        if self.speed is not None and (self.trace is None or self.rate is not None or not self.speed > 0):
            raise InvalidRequest(
                f"--speed {self.speed:g} is not above 0, without a trace, or next to --rate", field="speed",
                cure="give a trace and either --speed or --rate",
            )  # fmt: skip
        if self.rate is not None and not self.rate > 0:
            raise InvalidRequest(f"the rate is {self.rate:g}, not above 0", field="rate", value=self.rate)

    @property
    def name(self) -> str:
        """The load's name, for titles."""
        if self.trace is not None:
            return f"trace {self.trace.name}"
        prompts, outputs = self._lengths()
        preset = "" if self.prompts or self.outputs else f"{self.preset}: "
        arrivals = self.arrivals.value + (f" ({self.burstiness:g})" if self.arrivals is Arrivals.GAMMA else "")
        parts = [f"{preset}{prompts} in, {outputs} out", arrivals]
        if self.shared_prefix:
            parts.append(f"{self.shared_prefixes} shared prefixes of {self.shared_prefix}")
        if self.sessions:
            parts.append(f"{self.sessions} sessions")
        return ", ".join(parts)

    def build(self, servers: Sequence[Server]) -> tuple[Workload, float]:
        """The workload, which fits into the context of every server, and its rate.

        Raises:
            InvalidRequest: the trace cannot be read.
        """
        limits = [self.tokens_max, *(server.tokens_max for server in servers)]
        tokens_max = min((limit for limit in limits if limit is not None), default=None)
        if self.trace is not None:
            replay = TraceReplay(read_trace(self.trace), tokens_max)
            return replay, self.rate or replay.rate * (self.speed or 1.0)
        prompts, outputs = self._lengths()
        synthetic = Synthetic(
            prompts, outputs, self.arrivals, self.burstiness, self.shared_prefix, self.shared_prefixes, self.sessions,
            tokens_max=tokens_max,
        )  # fmt: skip
        return synthetic, self.rate or DEFAULT_RATE

    def _lengths(self) -> tuple[Lengths, Lengths]:
        if self.preset not in PRESETS:
            raise InvalidRequest(
                f"the workload {self.preset!r} is not known",
                field="workload",
                value=self.preset,
                allowed=tuple(PRESETS),
            )
        prompts, outputs = PRESETS[self.preset]
        return (
            prompts if self.prompts is None else parse_lengths(self.prompts),
            outputs if self.outputs is None else parse_lengths(self.outputs),
        )
