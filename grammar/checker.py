"""Checks grammars in another process, because nothing interrupts the grammar library: a grammar that takes too much
ends a fork of that process (`grammar.trial`), and its request is refused.

Every new grammar gets a moment of CPU time. Those that need more wait for each other, so they delay no ordinary ones.
Each client has one grammar at a time in line, so a client with many delays others by one of them.
"""

import asyncio
import hashlib
import signal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from baton.errors import BatonError, InternalError, InvalidRequest, Overloaded
from baton.types import Grammar
from grammar.limits import check_size, check_usable
from grammar.refusal import refusal
from grammar.trial_process import Answer, TrialProcess

_VERDICTS = 1024
_MIB = 1 << 20
_CURE = "simplify it: fewer or smaller repetitions, fewer alternatives"
# What ends a check because of its grammar: the bound of CPU time; errors of the library, which does so without memory.
_FAULTS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Bounds:
    """What the check of one grammar may take.

    Attributes:
        moment_cpu_s: of CPU time, at first.
        cpu_s: of CPU time, in a second try.
        memory_bytes: more than the process has without it.
    """

    moment_cpu_s: float = 0.05
    cpu_s: float = 3.0
    memory_bytes: int = 128 * _MIB


DEFAULT_BOUNDS = Bounds()


class GrammarChecker:
    """Used on one event loop. The process starts with the first grammar, and ends with `close` or with its parent.

    Args:
        tokenizer_json: a tokenizer of the `tokenizers` library.
        vocab_size: of the model, which may have more ids than the tokenizer; those are never allowed.
        eos_token_ids: the ids that end a sequence.
    """

    def __init__(
        self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int], bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        self._path = tokenizer_json
        self._eos_token_ids = tuple(eos_token_ids)
        self._bounds = bounds
        self._cpu_s = (bounds.moment_cpu_s, bounds.cpu_s)  # of each lane
        self._turns = tuple(asyncio.Lock() for _ in self._cpu_s)
        facts = {
            "tokenizer": str(tokenizer_json.absolute()),
            "vocab_size": vocab_size,
            "eos_token_ids": self._eos_token_ids,
            "memory_bytes": bounds.memory_bytes,
        }
        self._process = TrialProcess(facts, lanes=len(self._cpu_s))
        self._verdicts: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()  # with the lane that found it
        self._tries: set[asyncio.Task[Answer]] = set()
        self._turns_of_clients: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()  # and lanes

    @property
    def pid(self) -> int | None:
        """Of the process that checks grammars; None: there is none now."""
        return self._process.pid

    async def check(self, grammar: Grammar, *, client: str = "") -> None:
        """Returns if the grammar can be followed, and is cheap enough to compile.

        Args:
            client: whose request it is.

        Raises:
            InvalidRequest: it cannot, or is not; names the keyword of a JSON Schema, or the line.
            Overloaded: it cannot be checked now.
            InternalError: the tokenizer cannot be used for grammars.
        """
        check_usable(self._path, self._eos_token_ids)
        check_size(grammar)
        text = grammar.text.encode(errors="surrogatepass")
        key = hashlib.sha256(f"{grammar.kind.value}:".encode() + text).digest()
        for lane in range(len(self._cpu_s)):
            verdict = self._known(key, lane)
            if verdict is None:
                turn_of_client = self._turns_of_clients.setdefault((client, lane), asyncio.Lock())
                async with turn_of_client:
                    verdict = await self._find(key, lane, grammar.kind.value, text)
            if verdict.get("signal") != signal.SIGPROF:
                break
        if verdict:
            raise self._error(verdict)

    def close(self) -> None:
        """Ends the process. A check that is waiting raises Overloaded."""
        self._process.close()

    def _known(self, key: bytes, lane: int) -> Answer | None:
        if key not in self._verdicts:
            return None
        self._verdicts.move_to_end(key)
        found_in, verdict = self._verdicts[key]
        return verdict if found_in >= lane or verdict.get("signal") != signal.SIGPROF else None

    async def _find(self, key: bytes, lane: int, kind: str, text: bytes) -> Answer:
        turn = self._turns[lane]
        await turn.acquire()
        if (verdict := self._known(key, lane)) is not None:  # of the same grammar in another request
            turn.release()
            return verdict
        # The check keeps its turn to its end, even if its client does not wait for that.
        trying = asyncio.create_task(self._try(key, lane, kind, text))
        self._tries.add(trying)
        trying.add_done_callback(self._tries.discard)
        return await asyncio.shield(trying)

    async def _try(self, key: bytes, lane: int, kind: str, text: bytes) -> Answer:
        try:
            verdict = await self._ask(lane, kind, text)
            if "untried" in verdict or verdict.get("signal", signal.SIGALRM) not in (*_FAULTS, signal.SIGALRM):
                verdict = await self._ask(lane, kind, text)  # it ended, or was ended, for a reason of its own
        finally:
            self._turns[lane].release()
        if not verdict or "refused" in verdict or verdict.get("signal") in _FAULTS:
            self._verdicts[key] = lane, verdict
            while len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    async def _ask(self, lane: int, kind: str, text: bytes) -> Answer:
        try:
            return await self._process.ask(lane, kind, text, cpu_s=self._cpu_s[lane])
        except OSError as error:
            return {"untried": str(error) or type(error).__name__}

    def _error(self, verdict: Answer) -> BatonError:
        if "refused" in verdict:
            return InvalidRequest(**verdict["refused"])
        if "failed" in verdict:
            return InternalError(**verdict["failed"])
        ended_by = verdict.get("signal", 0)
        if ended_by == signal.SIGPROF:
            return refusal(f"the grammar takes more than {self._bounds.cpu_s:g} s of CPU time to check", cure=_CURE)
        if ended_by in _FAULTS:
            memory = f"{self._bounds.memory_bytes // _MIB} MiB of memory"
            return refusal(f"the grammar takes more than {memory} to check, or breaks the grammar library", cure=_CURE)
        why = verdict.get("untried") or f"{signal.Signals(ended_by).name} ended the check"
        return Overloaded(f"the grammar cannot be checked now: {why}", retry_after_s=1.0)
