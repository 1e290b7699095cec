"""Makes the prompts of texts to embed and of pairs to score, as the checkpoint's own files say. Pure; runs in threads.

A prompt's tokens equal those of sentence-transformers for the same checkpoint, but a text that is too long is an error
unless the client asks for it to be cut, where sentence-transformers cuts it in silence.
"""

from collections.abc import Sequence
from typing import TypeAlias

from baton.core.errors import ConfigError, ContextOverflow, InvalidRequest
from baton.gateway.text.model import ServedModel
from baton.models.config.pooling import EmbeddingConfig, Pooling, ScoreConfig
from baton.protos.internal.v1 import prefill_pb2 as pb

# A text, or token ids that are taken as they are.
Input: TypeAlias = str | list[int]

_TRUNCATE = "truncate_prompt_tokens"

# The template of Qwen3-Reranker, from its model card. User texts cannot write the special tokens in it.
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class EmbeddedTexts:
    """Makes prompts for embeddings.

    Args:
        max_context_tokens: most tokens that a node computes.
        truncate_to: cut the texts of longer prompts at their end, to so many tokens; -1: to the most that a prompt may
            have; None: refuse prompts that are too long.

    Raises:
        InvalidRequest: the model does not make embeddings, or computes fewer tokens than `truncate_to`.
    """

    def __init__(
        self, model: ServedModel, *, max_context_tokens: int, salt: str = "", truncate_to: int | None = None
    ) -> None:
        if model.embedding is None:
            kind = "scores pairs of texts: use /v1/rerank or /v1/score" if model.score is not None else "generates text"
            raise InvalidRequest(
                f"{model.name} does not make embeddings; it {kind}",
                field="model",
                value=model.name,
                cure="serve a checkpoint that says how to pool: one with modules.json and 1_Pooling/config.json",
            )
        self._model, self._config, self._salt = model, model.embedding, salt
        self._max_tokens = min(max_context_tokens - 1, self._config.max_tokens or max_context_tokens)
        self._truncate_to = checked_truncation(truncate_to, self._max_tokens)

    def check_prompt_name(self, name: str | None) -> str:
        """Returns the prompt's text.

        Raises:
            InvalidRequest: the checkpoint has no prompt of this name.
        """
        if name is None:
            return self._config.default_prompt
        if name not in self._config.prompts:
            raise InvalidRequest(
                f"the checkpoint has no prompt {name!r}",
                field="prompt_name",
                value=name,
                allowed=tuple(self._config.prompts) or ("none: the checkpoint has no prompts",),
            )
        return self._config.prompts[name]

    def prompts(self, inputs: Sequence[Input], *, before: str) -> list[pb.PoolPrompt]:
        """Makes one prompt for each input.

        Args:
            before: text that goes before each text; token ids are taken as they are.

        Raises:
            InvalidRequest: an input has no tokens, too many, or unknown ones.
        """
        skipped = self._tokens_of_prompt(before) if before and not self._config.include_prompt else 0
        return [self._prompt(index, each, before, skipped) for index, each in enumerate(inputs)]

    def _prompt(self, index: int, given: Input, before: str, skipped: int) -> pb.PoolPrompt:
        if isinstance(given, str):
            text = beginning(before + given, self._model, self._truncate_to)
            check_size(self._model, len(text), self._max_tokens, field=f"input[{index}]")
            token_ids = self._model.tokenizer.encode(text, salt=self._salt)
            around = self._model.tokenizer.encode("", salt=self._salt)
        else:
            token_ids, skipped, around = given, 0, []
        token_ids = truncated(token_ids, self._truncate_to, around)
        check_tokens(self._model, token_ids, self._max_tokens, field=f"input[{index}]")
        start, stop = span(self._config, len(token_ids), skipped)
        return pb.PoolPrompt(token_ids=token_ids, token_start=start, token_stop=stop)

    def _tokens_of_prompt(self, before: str) -> int:
        """The number of tokens of the prompt, without a special token after it."""
        token_ids = self._model.tokenizer.encode(before, salt=self._salt)
        ends = self._model.tokenizer.encode("", salt=self._salt)
        return len(token_ids) - (bool(ends) and token_ids[-1] == ends[-1])


def span(config: EmbeddingConfig, length: int, skipped: int) -> tuple[int, int]:
    """The tokens that are pooled: from the first one to the one after the last."""
    if config.pooling is Pooling.LAST:
        return length - 1, length
    if config.pooling is Pooling.CLS:
        return 0, 1
    return min(skipped, length - 1), length


class ScoredPairs:
    """Makes prompts for the scores of pairs.

    Args:
        max_context_tokens: most tokens that a node computes.
        truncate_to: cut the texts of longer prompts at their end, to so many tokens; -1: to the most that a prompt may
            have; None: refuse prompts that are too long.

    Raises:
        InvalidRequest: the model does not score pairs, or computes fewer tokens than `truncate_to`.
    """

    def __init__(
        self, model: ServedModel, *, max_context_tokens: int, salt: str = "", truncate_to: int | None = None
    ) -> None:
        if model.score is None:
            kind = "makes embeddings: use /v1/embeddings" if model.embedding is not None else "generates text"
            raise InvalidRequest(
                f"{model.name} does not score pairs of texts; it {kind}",
                field="model",
                value=model.name,
                cure="serve a reranker: a checkpoint with a LogitScore step in modules.json, classifier_from_token in "
                "config.json, or an architecture ...ForSequenceClassification with one label",
            )
        self._model, self._config, self._salt = model, model.score, salt
        self._max_tokens = min(max_context_tokens - 1, self._config.max_tokens or max_context_tokens)
        self._truncate_to = checked_truncation(truncate_to, self._max_tokens)
        self._wanted = logits_of(model, self._config)

    def prompts(self, pairs: Sequence[tuple[str, str]], *, field: str, instruction: str = "") -> list[pb.PoolPrompt]:
        """Makes one prompt for each pair of a query and a document.

        Args:
            field: name of the documents in the client's body, for errors.
            instruction: what makes a document relevant; empty: the template's own.

        Raises:
            InvalidRequest: a pair has too many tokens.
        """
        if instruction and not self._config.instruct:
            raise InvalidRequest("this model's template has no instruction", field="instruction", value=instruction)
        return [self._prompt(index, pair, field, instruction) for index, pair in enumerate(pairs)]

    def _prompt(self, index: int, pair: tuple[str, str], field: str, instruction: str) -> pb.PoolPrompt:
        field, (query, document) = f"{field}[{index}]", pair
        document = beginning(document, self._model, self._truncate_to)
        check_size(self._model, len(query) + len(document), self._max_tokens, field=field)
        token_ids = self._tokens(query, document, instruction)
        if self._truncate_to is not None and len(token_ids) > self._truncate_to:
            bare = self._tokens(query, "", instruction)
            if len(bare) >= self._truncate_to:
                raise _nothing_left(self._truncate_to, len(bare) + 1, self._max_tokens)
            token_ids = truncated(token_ids, self._truncate_to, bare)
        check_tokens(self._model, token_ids, self._max_tokens, field=field)
        last = len(token_ids) - 1
        return pb.PoolPrompt(
            token_ids=token_ids,
            token_start=last,
            token_stop=last + 1,
            logits_of=self._wanted,
            classify=not self._wanted,
        )

    def _tokens(self, query: str, document: str, instruction: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if not self._config.instruct:
            return tokenizer.encode_pair(query, document)
        body = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        return [
            *tokenizer.encode_own(_BEFORE),
            *tokenizer.encode(body, add_special_tokens=False, salt=self._salt),
            *tokenizer.encode_own(_AFTER),
        ]


def logits_of(model: ServedModel, config: ScoreConfig) -> tuple[int, ...]:
    """The token ids of yes and no, of yes alone, or () for a classification head.

    Raises:
        ConfigError: one of them is not in the vocabulary.
    """
    found: list[int] = []
    for given in (config.yes, config.no):
        if given is None:
            continue
        token_id = model.tokenizer.token_id(given) if isinstance(given, str) else given
        if token_id is None or token_id >= model.vocab_size:
            raise ConfigError(f"the score's token {given!r} is not in the vocabulary", field="model", value=given)
        found.append(token_id)
    return tuple(found)


def checked_truncation(given: int | None, max_tokens: int) -> int | None:
    """Returns to how many tokens longer prompts are cut; None: they are refused.

    Raises:
        InvalidRequest: a prompt cannot have so many tokens, or none would be left.
    """
    if given is None or 1 <= given <= max_tokens:
        return given
    if given == -1:
        return max_tokens
    message, allowed = f"{_TRUNCATE} is {given}", (f"1 to {max_tokens}", f"-1 for {max_tokens}")
    raise InvalidRequest(message, field=_TRUNCATE, value=given, allowed=allowed)


def beginning(text: str, model: ServedModel, truncate_to: int | None) -> str:
    """Returns the part of a text that can become so many tokens, so that no rest is tokenized only to be cut off."""
    return text if truncate_to is None else text[: truncate_to * model.tokenizer.longest_token_bytes]


def truncated(token_ids: list[int], truncate_to: int | None, around: Sequence[int]) -> list[int]:
    """Cuts tokens out before those that end every prompt, such as the one that last-token pooling takes.

    Args:
        around: tokens of the same prompt without the text that is cut.

    Raises:
        InvalidRequest: nothing of the text would be left.
    """
    if truncate_to is None or len(token_ids) <= truncate_to:
        return token_ids
    most = min(len(token_ids), len(around))
    kept = next((n for n in range(most) if token_ids[-1 - n] != around[-1 - n]), most)
    if kept >= truncate_to:
        raise _nothing_left(truncate_to, kept + 1, len(token_ids))
    return [*token_ids[: truncate_to - kept], *token_ids[len(token_ids) - kept :]]


def _nothing_left(truncate_to: int, least: int, most: int) -> InvalidRequest:
    message = f"{_TRUNCATE} is {truncate_to}, which leaves nothing of the text"
    return InvalidRequest(message, field=_TRUNCATE, value=truncate_to, allowed=(f"{least} to {most}",))


def check_size(model: ServedModel, characters: int, max_tokens: int, *, field: str) -> None:
    """Refuses a text that is far too long before it is tokenized."""
    if characters > max_tokens * model.tokenizer.longest_token_bytes:
        raise _too_long(-(-characters // model.tokenizer.longest_token_bytes), max_tokens, field, "at least ")


def check_tokens(model: ServedModel, token_ids: list[int], max_tokens: int, *, field: str) -> None:
    """Raises InvalidRequest if there are no tokens, too many, or unknown ones."""
    if not token_ids:
        raise InvalidRequest("the text has no tokens", field=field, allowed=("1 token or more",))
    if len(token_ids) > max_tokens:
        raise _too_long(len(token_ids), max_tokens, field)
    model.check_token_ids(field, token_ids)


def _too_long(tokens: int, max_tokens: int, field: str, least: str = "") -> ContextOverflow:
    """Begins as OpenAI's error does, because client libraries recognize it by its text."""
    message = f"This model's maximum context length is {max_tokens} tokens. However, {field} has {least}{tokens} tokens"
    allowed, cure = (f"1 to {max_tokens} tokens",), f"shorten or split it, or cut it with {_TRUNCATE} -1"
    error = ContextOverflow(message, field=field, value=tokens, allowed=allowed, cure=cure)
    error.tokens, error.max_prompt_tokens = tokens, max_tokens
    return error
