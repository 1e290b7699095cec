"""Decides how long the transfer thread sleeps between polls of messages in flight. Pure.

While messages are in flight, it sleeps for a fraction of the time since the last event. On two busy cores, naps of 20
us moved 0.8-2.4 GB/s through shared memory, waiting for UCX's event 0.2, and polling without a pause 0.1-0.2: each
message needs both ends to run in turn. Naps also leave the GIL to the other threads.
"""

from dataclasses import dataclass

_SHORTEST_S = 20e-6
# With a GPU, a message takes 50-200 us and passes six such waits, so they are shorter (see `wake_punctually`).
_SHORTEST_GPU_S = 5e-6
_LONGEST_S = 1e-3
_FRACTION = 1 / 8
# With nothing in flight, the thread polls this long, because segments arrive in bursts; then it waits for an event.
_HOT_S = 2e-3
# While only saves are in flight, for which nobody waits. Each nap ends with a wait for the GIL, which the engine needs.
# With the short naps 325 saved entries a second took 2,000 turns of the thread. A GPU copies meanwhile, so the thread
# waits for an event, at most 2 ms; a CPU copies in the turns.
_SAVES_S = 3e-4


@dataclass(frozen=True)
class Naps:
    """The naps of one thread.

    Attributes:
        on_gpu: the cache is in GPU memory.
    """

    on_gpu: bool

    def next_s(self, quiet_s: float, *, is_awaited: bool, is_saving: bool) -> float | None:
        """Length of the next nap in seconds. Returns None if the thread should wait for an event.

        Args:
            quiet_s: since the last event that somebody waited for.
            is_awaited: something is in flight that somebody waits for.
            is_saving: saves are in flight.
        """
        if is_awaited or quiet_s < _HOT_S:
            shortest_s = _SHORTEST_GPU_S if self.on_gpu else _SHORTEST_S
            return min(max(quiet_s * _FRACTION, shortest_s), _LONGEST_S)
        return _SAVES_S if is_saving and not self.on_gpu else None
