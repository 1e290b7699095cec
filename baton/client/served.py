"""Descriptions of the models that a gateway serves, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class ModelRevision:
    """A revision of the weights that serves now; `name` is the operator's name for it, or empty."""

    revision: str
    name: str


@dataclass(frozen=True)
class ModelCard:
    """A served model, or a LoRA adapter.

    Attributes:
        revisions: revisions of the weights that serve; more than one only while nodes change to new weights.
        parent: of an adapter, the model that it belongs to; else empty.
        description: for people; "": none.
    """

    name: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    revisions: tuple[ModelRevision, ...] = ()
    parent: str = ""
    description: str = ""

    @classmethod
    def from_message(cls, message: pb.ModelCard) -> "ModelCard":
        revisions = tuple(ModelRevision(each.revision, each.name) for each in message.revisions)
        return cls(
            message.name,
            message.architecture,
            message.max_context_tokens,
            message.vocab_size,
            revisions,
            message.parent,
            message.description,
        )


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model for clients that do not have its files.

    Attributes:
        default_sampling: the values of generation_config.json, under the names of `SamplingParams`.
        tokenizer_sha256: SHA-256 of the archive that `AsyncClient.tokenizer` returns, in hex.
        grammar_kinds: names of the `GrammarKind` members that the gateway accepts.
    """

    model: ModelCard
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    default_sampling: Mapping[str, Any]
    has_chat_template: bool
    tokenizer_sha256: str
    grammar_kinds: tuple[str, ...]

    @classmethod
    def from_message(cls, message: pb.GetModelInfoResponse) -> "ModelInfo":
        return cls(
            model=ModelCard.from_message(message.model),
            eos_token_ids=tuple(message.eos_token_ids),
            bos_token_id=message.bos_token_id if message.HasField("bos_token_id") else None,
            default_sampling=_given(message.default_sampling),
            has_chat_template=message.has_chat_template,
            tokenizer_sha256=message.tokenizer_sha256,
            grammar_kinds=tuple(map(_kind_name, message.grammar_kinds)),
        )


def _kind_name(kind: common_pb2.GrammarKind.ValueType) -> str:
    return common_pb2.GrammarKind.Name(kind).removeprefix("GRAMMAR_KIND_")


def _given(sampling: common_pb2.SamplingParams) -> dict[str, Any]:
    """Returns the scalar and list fields that are set; generation_config.json sets no messages."""
    values = {field.name: value for field, value in sampling.ListFields() if field.message_type is None}
    return {name: value if isinstance(value, int | float | str) else tuple(value) for name, value in values.items()}
