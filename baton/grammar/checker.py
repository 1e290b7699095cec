"""Checks grammars in another process, because nothing interrupts the grammar library: a grammar that takes too much
ends a fork of that process (`baton.grammar.trial`), and its request is refused.

Every new grammar gets a moment of CPU time. Grammars that need more wait for each other, so that they do not delay
ordinary ones.
"""

import hashlib
import signal
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton.bounded.lanes import Answer
from baton.bounded.process import FAULTS, Bound, BoundedProcess
from baton.bounded.turns import Turns
from baton.core.errors import BatonError, InternalError, InvalidRequest, Overloaded
from baton.core.types import Grammar
from baton.grammar.limits import check_size, check_usable
from baton.grammar.refusal import refusal

_VERDICTS = 1024
_MIB = 1 << 20
_CURE = "simplify it: fewer or smaller repetitions, fewer alternatives"


@dataclass(frozen=True)
class CheckBounds:
    """Bounds of the check of one grammar.

    Attributes:
        moment_cpu_s: CPU time of the first try.
        cpu_s: CPU time of the second try.
        memory_bytes: memory beyond that of the process without the check.
    """

    moment_cpu_s: float = 0.05
    cpu_s: float = 3.0
    memory_bytes: int = 128 * _MIB


DEFAULT_BOUNDS = CheckBounds()


class GrammarChecker:
    """Checks grammars in a process that starts with the first one, and ends with `close` or with its parent. Used on
    one event loop.

    Args:
        tokenizer_json: a tokenizer of the `tokenizers` library.
        vocab_size: size of the model's vocabulary; ids that the tokenizer lacks are never allowed.
        eos_token_ids: the ids that end a sequence.
    """

    def __init__(
        self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int], bounds: CheckBounds = DEFAULT_BOUNDS
    ) -> None:
        self._path = tokenizer_json
        self._eos_token_ids = tuple(eos_token_ids)
        self._bounds = bounds
        self._cpu_s = (bounds.moment_cpu_s, bounds.cpu_s)  # of each lane
        self._turns = Turns(len(self._cpu_s))
        facts = {
            "tokenizer": str(tokenizer_json.absolute()),
            "vocab_size": vocab_size,
            "eos_token_ids": self._eos_token_ids,
        }
        self._process = BoundedProcess("baton.grammar.trial", "check grammars", facts, lanes=len(self._cpu_s))
        self._verdicts: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()  # with the lane that found it

    @property
    def pid(self) -> int | None:
        """The pid of the process that checks grammars. Returns None if there is none now."""
        return self._process.pid

    async def check(self, grammar: Grammar, *, client: str = "") -> None:
        """Checks that the grammar can be followed, and is cheap enough to compile.

        Args:
            client: the client whose request it is.

        Raises:
            InvalidRequest: the grammar fails the check; names the keyword of a JSON Schema, or the line.
            Overloaded: it cannot be checked now.
            InternalError: the tokenizer cannot be used for grammars.
        """
        check_usable(self._path, self._eos_token_ids)
        check_size(grammar)
        text = grammar.text.encode(errors="surrogatepass")
        key = hashlib.sha256(f"{grammar.kind.value}:".encode() + text).digest()
        verdict: Answer = {}
        for lane in range(len(self._cpu_s)):
            find = partial(self._find, key, lane, grammar.kind.value, text)
            known = self._known(key, lane)
            verdict = await self._turns.run(lane, client, find) if known is None else known
            if verdict.get("signal") != signal.SIGPROF:
                break
        if "bytes" not in verdict:
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
        if (known := self._known(key, lane)) is not None:  # of the same grammar in another request
            return known
        bound = Bound(self._cpu_s[lane], self._bounds.memory_bytes)
        verdict, _ = await self._process.ask(lane, {"kind": kind}, text, bound)
        if "bytes" in verdict or "refused" in verdict or verdict.get("signal") in FAULTS:
            self._verdicts[key] = lane, verdict
            while len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _error(self, verdict: Answer) -> BatonError:
        if "refused" in verdict:
            return InvalidRequest(**verdict["refused"])
        if "failed" in verdict:
            return InternalError(**verdict["failed"])
        ended_by = verdict.get("signal", 0)
        if ended_by == signal.SIGPROF:
            return refusal(f"the grammar takes more than {self._bounds.cpu_s:g} s of CPU time to check", cure=_CURE)
        if ended_by in FAULTS:
            memory = f"{self._bounds.memory_bytes // _MIB} MiB of memory"
            return refusal(f"the grammar takes more than {memory} to check, or breaks the grammar library", cure=_CURE)
        why = verdict.get("untried") or f"{signal.Signals(ended_by).name} ended the check"
        return Overloaded(f"the grammar cannot be checked now: {why}", retry_after_s=1.0)
