"""The gateway's view of the served model: name, limits, tokenizer and chat format, read without weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import create_model

from baton.core.errors import InvalidRequest, UnknownModel
from baton.core.sampling import SAMPLING_FIELDS, SamplingParams
from baton.core.sampling_field import Door, Kind
from baton.core.token_ids import first_outside
from baton.gateway.text.chat.checkpoint_files import read_checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.renderer import ChatRenderer
from baton.gateway.text.tokenizer import TextTokenizer
from baton.grammar.checker import GrammarChecker
from baton.models.config.fields import Fields, Integers
from baton.models.config.file import ConfigFile
from baton.models.config.pooling import EmbeddingConfig, ScoreConfig, read_embedding, read_score
from baton.models.families.reader import read_config
from baton.models.loading.identity import config_digest
from baton.models.loading.tokenizer_files.find import tokenizer_json
from baton.models.loading.tokenizer_files.vocabulary import vocabulary_digest
from baton.protos.v1 import node_status_pb2
from baton.settings.config import DEMO_NOTE, is_demo_model
from baton.settings.model_source import model_name


@dataclass(frozen=True)
class ServedModel:
    """The served model, without its weights. Nodes must serve the same model.

    Attributes:
        directory: the checkpoint's directory.
        default_sampling: the sampling parameters of generation_config.json, which replace absent ones.
        chat: creates the parsers of outputs.
        renderer: prepares conversations in another process.
        grammars: checks constraints in another process.
        embedding: how the checkpoint makes vectors; None: it does not.
        score: how the checkpoint scores pairs of texts; None: it does not.
        generates: whether the checkpoint has a language model head.
        hidden_size: length of a vector.
    """

    name: str
    architecture: str
    config_digest: str
    vocabulary_digest: str
    vocab_size: int
    max_context_tokens: int
    tokenizer: TextTokenizer
    directory: Path
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    default_sampling: SamplingParams
    chat: ChatModel
    renderer: ChatRenderer
    grammars: GrammarChecker
    embedding: EmbeddingConfig | None = None
    score: ScoreConfig | None = None
    generates: bool = True
    hidden_size: int = 0

    def close(self) -> None:
        """Ends the processes that render conversations and check constraints."""
        self.renderer.close()
        self.grammars.close()

    @property
    def description(self) -> str:
        """A remark for people who talk to the model; "": none."""
        return DEMO_NOTE if is_demo_model(self.directory) else ""

    @property
    def identity(self) -> node_status_pb2.ModelIdentity:
        """The identity that nodes must have, without a digest of the weights, which the gateway does not read."""
        return node_status_pb2.ModelIdentity(
            name=self.name,
            architecture=self.architecture,
            config_digest=self.config_digest,
            vocabulary_digest=self.vocabulary_digest,
        )

    def check_generates(self) -> None:
        """Checks that the model can generate.

        Raises:
            InvalidRequest: it only makes embeddings or scores.
        """
        if not self.generates:
            paths = "/v1/embeddings" if self.embedding is not None else "/v1/rerank and /v1/score"
            raise InvalidRequest(
                f"{self.name} cannot generate text: its checkpoint has no usable language model head",
                field="model",
                value=self.name,
                cure=f"use {paths}, or serve a generative checkpoint",
            )

    def check_name(self, name: str, *, hide_names: bool = False, adapters: Iterable[str] = ()) -> None:
        """Checks that a request's model name is empty or this model's name.

        Args:
            hide_names: do not reveal the served model's name in the error.
            adapters: names of adapters, for the error.

        Raises:
            UnknownModel: the request names another model.
        """
        if name not in ("", self.name):
            allowed = () if hide_names else (self.name, *adapters)
            raise UnknownModel(f"model {name!r} is not served", field="model", value=name, allowed=allowed)

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Checks that token ids are in the vocabulary.

        Raises:
            InvalidRequest: an id is not.
        """
        if (wrong := first_outside(token_ids, self.vocab_size)) is not None:
            raise InvalidRequest(
                f"{field} has token id {wrong}", field=field, value=wrong, allowed=(f"0 to {self.vocab_size - 1}",)
            )


def read_served_model(
    directory: Path,
    name: str | None,
    chat_template: Path | None = None,
    *,
    max_context_tokens: int | None = None,
    special_in_texts: bool = True,
) -> ServedModel:
    """Reads the model that the gateway serves from a checkpoint's directory.

    Args:
        name: name for clients; None: derived from the directory.
        chat_template: a file with a template that replaces the checkpoint's.
        max_context_tokens: longest prompt plus output; None: the model's limit.
        special_in_texts: whether special tokens in clients' texts take effect; see `TextTokenizer`.

    Raises:
        ConfigError: the directory contains no known model, or no usable tokenizer.
    """
    config = read_config(directory).for_context(max_context_tokens)
    tokenizer = TextTokenizer(directory, special_in_texts=special_in_texts)
    tokenizer.check_vocabulary(config.vocab_size)
    checkpoint = read_checkpoint(directory, chat_template)
    return ServedModel(
        name=name or model_name(directory),
        architecture=config.architecture,
        config_digest=config_digest(config),
        vocabulary_digest=vocabulary_digest(tokenizer_json(directory)),
        vocab_size=config.vocab_size,
        max_context_tokens=min(max_context_tokens or config.max_context_tokens, config.max_context_tokens),
        tokenizer=tokenizer,
        directory=directory,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=read_bos_token_id(directory),
        default_sampling=read_default_sampling(directory),
        chat=ChatModel(checkpoint),
        renderer=ChatRenderer(checkpoint, aliases=tokenizer.aliases),
        grammars=GrammarChecker(tokenizer_json(directory), config.vocab_size, config.eos_token_ids),
        embedding=read_embedding(directory),
        score=read_score(directory),
        generates=not config.headless,
        hidden_size=config.hidden_size,
    )


class _BeginOfText(Fields):
    bos_token_id: Integers = ()


def read_default_sampling(directory: Path) -> SamplingParams:
    """Reads the sampling parameters of generation_config.json; others stay unset. As in vLLM, `do_sample` is ignored.

    Raises:
        ConfigError: a number is wrong; the error names the file.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return SamplingParams()
    given = _defaults_of_files().read(ConfigFile.read(path)).model_dump(exclude_none=True)
    for name, value in given.items():
        lenient = SAMPLING_FIELDS[name].lenient
        given[name] = value if lenient is None else lenient.read(value)
    return SamplingParams(**given)


def _defaults_of_files() -> type[Fields]:
    """Returns a model of the sampling parameters that the file may contain."""
    taken: dict[str, Any] = {}
    for name, field in SAMPLING_FIELDS.items():
        if Door.GENERATION_CONFIG in field.doors:
            assert field.bounds is not None, "only numbers may have defaults in the file"
            least = field.lenient.low if field.lenient is not None else field.bounds.low
            limits = (Gt(least) if field.bounds.above else Ge(least), Le(field.bounds.high))
            kind = int if field.kind is Kind.INTEGER else float
            taken[name] = (Annotated[kind, *limits] | None, None)
    return create_model("DefaultSampling", __base__=Fields, **taken)


def read_bos_token_id(directory: Path) -> int | None:
    """Reads the id from generation_config.json, else from config.json. Returns None if neither has it.

    Raises:
        ConfigError: the value is not a token id.
    """
    config = ConfigFile.read(directory / "config.json")
    files = [config, config.table("text_config")]
    generation = directory / "generation_config.json"
    if generation.exists():
        files.insert(0, ConfigFile.read(generation))
    return next((ids[0] for file in files if (ids := _BeginOfText.read(file).bos_token_id)), None)
