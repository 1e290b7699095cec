"""What clients ask for: a few requests of every sort, drawn by seed, whose answers one process computes beforehand."""

import json
from dataclasses import dataclass
from random import Random

from baton.core.sampling import SamplingParams
from baton.core.types import Grammar, GrammarKind

_TOKENS = range(10, 2000)
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "array", "items": {"enum": ["monday", "friday"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Work:
    """One request, but for its deadline, priority and salt, which change no token.

    Attributes:
        outputs: how many it asks for.
    """

    name: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    outputs: int = 1


@dataclass(frozen=True)
class Answer:
    """One output as one process computes it."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[float, ...] = ()


def draw_works(random: Random) -> tuple[Work, ...]:
    """The same sorts for every seed, with other prompts and seeds."""

    def work(name: str, prompt: tuple[int, int], *, outputs: int = 1, grammar: Grammar | None = None,
             **sampling: object) -> Work:  # fmt: skip
        tokens = tuple(random.choices(_TOKENS, k=random.randint(*prompt)))
        drawn = {"temperature": 0.0, "ignore_eos": grammar is None, "grammar": grammar, **sampling}
        if drawn["temperature"]:
            drawn["seed"] = random.randrange(1 << 32)
        return Work(name, tokens, SamplingParams(**drawn), outputs)  # type: ignore[arg-type]

    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA))
    choice = Grammar(GrammarKind.CHOICE, json.dumps(["a lock", "a queue of tasks", "an event loop"]))
    regex = Grammar(GrammarKind.REGEX, "[a-f]{4,12}-[0-9]{8}")
    return (
        work("greedy, short", (3, 12), max_tokens=12),
        work("greedy, medium", (40, 90), max_tokens=24),
        work("greedy, long prompt", (300, 500), max_tokens=16),
        work("greedy, very long prompt", (900, 1100), max_tokens=6),
        work("greedy, long output", (20, 60), max_tokens=120),
        work("one token", (60, 200), max_tokens=1),
        work("drawn", (40, 120), max_tokens=40, temperature=1.0),
        work("drawn, penalties", (40, 200), max_tokens=40, temperature=0.9, top_p=0.9, presence_penalty=0.5),
        work("drawn, repetition", (10, 80), max_tokens=60, temperature=1.2, top_k=50, repetition_penalty=1.1),
        work("logprobs", (50, 150), max_tokens=24, logprobs=2),
        work("logprobs, drawn", (50, 150), max_tokens=24, logprobs=1, temperature=1.0),
        work("stop string", (40, 120), max_tokens=60, temperature=1.0, stop=("never this", "er", " a")),
        work("two outputs", (40, 120), max_tokens=16, outputs=2, temperature=1.0),
        work("JSON schema", (40, 120), max_tokens=80, grammar=schema, temperature=1.0),
        work("choice", (40, 120), max_tokens=16, grammar=choice, temperature=1.0),
        work("regex", (40, 120), max_tokens=30, grammar=regex, temperature=1.0),
    )
