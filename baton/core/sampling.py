"""The sampling parameters, each declared once: `ResolvedSampling` with meaning, bounds, default and doors.

`SamplingParams` has those that a client sets. HTTP bodies, vLLM's messages, flags, checks and docs/api.md follow from
the table `SAMPLING_FIELDS`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, Self

from baton.core.errors import InvalidRequest
from baton.core.sampling_field import (
    EVERYWHERE,
    FINITE,
    HTTP,
    OPENAI,
    U32_MAX,
    U64_MAX,
    Bounds,
    Door,
    Lenient,
    SamplingField,
    sampling_table,
)
from baton.core.types import Grammar

MAX_LOGPROBS = 20

_PENALTY = Bounds(-2, 2, "-2 to 2")
_ALTERNATIVES = Bounds(0, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
_MODELS_OWN = (*EVERYWHERE, Door.GENERATION_CONFIG)
_IN_BODIES = (*HTTP, Door.VLLM)


def _no_bias() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True)
class ResolvedSampling:
    """How to choose the tokens of one request, with every parameter decided. Gateways resolve, nodes obey.

    None appears only as a choice of its own: no logprobs, no constraint.

    Raises:
        InvalidRequest: a value has another type or is out of bounds; names it.
    """

    max_tokens: Annotated[
        int,
        SamplingField(
            "most tokens of the output",
            Bounds(1, U32_MAX, "1 to 2**32 - 1"),
            renamed={Door.CHAT: "max_completion_tokens", Door.RESPONSES: "max_output_tokens"},
            by_hand=HTTP,
            unset="16; in a conversation, what the context leaves",
        ),
    ] = 16
    min_tokens: Annotated[
        int, SamplingField("no end before this many tokens", Bounds(0, U32_MAX, "0 to max_tokens"))
    ] = 0
    temperature: Annotated[float, SamplingField("divides logits", Bounds(0, 100, "0 (greedy) to 100"), _MODELS_OWN)] = (
        1.0
    )
    top_p: Annotated[
        float,
        SamplingField(
            "draw from the most probable tokens of this total probability",
            Bounds(0, 1, "above 0, up to 1", above=True),
            _MODELS_OWN,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        SamplingField(
            "draw from this many most probable tokens",
            Bounds(0, U32_MAX, "0 (off) to 2**32 - 1"),
            _MODELS_OWN,
            lenient=Lenient(-1),
        ),
    ] = 0
    min_p: Annotated[
        float,
        SamplingField(
            "draw from tokens of at least this share of the best one's probability",
            Bounds(0, 1, "0 to 1"),
            _MODELS_OWN,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        SamplingField(
            "divides logits of tokens that prompt or output have",
            Bounds(0, FINITE, "a number above 0", above=True),
            _MODELS_OWN,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, SamplingField("subtracted from logits of tokens that the output has", _PENALTY)
    ] = 0.0
    frequency_penalty: Annotated[
        float, SamplingField("subtracted for each time that the output has the token", _PENALTY)
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float],
        SamplingField("added to logits, by token id", Bounds(-100, 100, "-100 to 100"), _IN_BODIES, items_max=1024),
    ] = field(default_factory=_no_bias)
    seed: Annotated[
        int,
        SamplingField(
            "the same seed draws the same tokens",
            Bounds(0, U64_MAX, "0 to 2**64 - 1"),
            lenient=Lenient(-(2**63), modulus=2**64),
            unset="drawn by the gateway",
        ),
    ] = 0
    stop_token_ids: Annotated[
        tuple[int, ...], SamplingField("tokens that end the output", doors=_IN_BODIES, items_max=1024)
    ] = ()
    stop: Annotated[
        tuple[str, ...],
        SamplingField("texts that end the output", renamed={Door.MESSAGES: "stop_sequences"}, items_max=256),
    ] = ()
    ignore_eos: Annotated[bool, SamplingField("go on after the token that ends a text")] = False
    logprobs: Annotated[
        int | None,
        SamplingField(
            "alternatives for each token, with their logprobs",
            _ALTERNATIVES,
            (*OPENAI, Door.RESPONSES, Door.VLLM, Door.GENERATE_COMMAND),
            renamed={Door.CHAT: "top_logprobs", Door.RESPONSES: "top_logprobs"},
            by_hand=HTTP,
        ),
    ] = None
    include_stop: Annotated[
        bool,
        SamplingField(
            "keep the text or token that ended the output",
            doors=_IN_BODIES,
            renamed=dict.fromkeys(_IN_BODIES, "include_stop_str_in_output"),
        ),
    ] = False
    grammar: Annotated[
        Grammar | None,
        SamplingField(
            "what the output must be",
            doors=_IN_BODIES,
            renamed={
                Door.CHAT: "response_format",
                Door.COMPLETIONS: "response_format",
                Door.RESPONSES: "text.format",
                Door.MESSAGES: "output_config.format",
                Door.VLLM: "constraint",
            },
            by_hand=_IN_BODIES,
        ),
    ] = None
    skip_special_tokens: Annotated[
        bool, SamplingField("leave special tokens out of the text", doors=(*OPENAI, Door.VLLM))
    ] = True
    prompt_logprobs: Annotated[
        int | None,
        SamplingField(
            "alternatives for each prompt token, with their logprobs; not in a stream",
            _ALTERNATIVES,
            (*OPENAI, Door.VLLM),
        ),
    ] = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters that a client sets; docs/api.md describes each.

    None is unset: the gateway then takes the model's generation_config.json, then the neutral default. A seed is drawn.

    Raises:
        InvalidRequest: a value has another type or is out of bounds; names it.
        TypeError: there is no such parameter; names all of them.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    stop: Sequence[str] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    include_stop: bool | None = None
    grammar: Grammar | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None

    def __new__(cls, *_values: object, **named: object) -> Self:
        # Python's own error for an unknown name lists no names.
        unknown = next((name for name in named if name not in SAMPLING_FIELDS), None)
        if unknown is not None:
            raise TypeError(f"there is no sampling parameter {unknown}; there are {', '.join(SAMPLING_FIELDS)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check(self)

    def set_values(self) -> dict[str, Any]:
        """The parameters that are set, by name."""
        given = ((each.name, getattr(self, each.name)) for each in fields(self))
        return {name: value for name, value in given if value is not None}

    def over(self, defaults: "SamplingParams") -> "SamplingParams":
        """These parameters, and those of `defaults` where these are unset."""
        return SamplingParams(**(defaults.set_values() | self.set_values()))

    def resolved(self) -> ResolvedSampling:
        """These parameters, and the neutral defaults where these are unset."""
        return ResolvedSampling(**{name: _frozen(value) for name, value in self.set_values().items()})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _check(sampling: ResolvedSampling | SamplingParams) -> None:
    for each in SAMPLING_FIELDS.values():
        value = getattr(sampling, each.name)
        if value is not None and value is not each.default:
            each.check(value)
    least, most = sampling.min_tokens, sampling.max_tokens
    if least is not None and most is not None and least > most:
        allowed = (SAMPLING_FIELDS["min_tokens"].allowed,)
        raise InvalidRequest(f"min_tokens is {least}", field="min_tokens", value=least, allowed=allowed)


SAMPLING_FIELDS = sampling_table(ResolvedSampling)
