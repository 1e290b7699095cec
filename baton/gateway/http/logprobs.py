"""Writes logprobs of output tokens in OpenAI's two shapes, and of prompt tokens in vLLM's. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from baton.gateway.text.reply import Detokenizing
from baton.protos.v1 import common_pb2

_LOWEST = -9999.0  # OpenAI's value for an impossible token, because JSON has no infinity


class LogprobTexts(Protocol):
    """The part of `TextTokenizer` that returns tokens as bytes and as text."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def text_after(self, *, is_prompt: bool, skip_special_tokens: bool) -> Detokenizing: ...


class LogprobWriter:
    """Writes the logprobs of one model's tokens.

    Args:
        as_ids: write token_id:N in place of a token's text.
        skip_special_tokens: whether the outputs' texts leave out special tokens.
    """

    def __init__(self, texts: LogprobTexts, *, as_ids: bool, skip_special_tokens: bool = True) -> None:
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._as_ids = as_ids

    def chat(self, tokens: Iterable[common_pb2.Token]) -> dict[str, Any]:
        """Returns the `logprobs` of a chat completion's choice."""
        return {"content": [self._chat_token(token) for token in tokens], "refusal": None}

    def prompt(self, tokens: Iterable[common_pb2.PromptLogprob]) -> list[dict[str, Any] | None]:
        """Returns `prompt_logprobs`: each token and its alternatives by token id, and None for the first token."""
        return [self._prompt_token(token) if token.HasField("logprob") else None for token in tokens]

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._texts.token_text(token_id)

    def text(self, *, with_prompt: bool) -> Detokenizing:
        """Returns a detokenizer for a choice's text, which may begin with the prompt."""
        return self._texts.text_after(is_prompt=with_prompt, skip_special_tokens=self._skip_special_tokens)

    def _chat_token(self, token: common_pb2.Token) -> dict[str, Any]:
        alternatives = [self._entry(other.token_id, other.logprob) for other in token.top_logprobs]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": alternatives}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = list(self._texts.token_bytes(token_id))
        return {"token": self.name(token_id), "logprob": max(logprob, _LOWEST), "bytes": spelled}

    def _prompt_token(self, token: common_pb2.PromptLogprob) -> dict[str, Any]:
        listed: dict[str, Any] = {}
        for rank, other in enumerate(token.top_logprobs, start=1):
            listed[str(other.token_id)] = self._prompt_entry(other.token_id, other.logprob, rank)
        if str(token.token_id) not in listed:
            listed[str(token.token_id)] = self._prompt_entry(token.token_id, token.logprob, None)
        return listed

    def _prompt_entry(self, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        text = self._texts.token_text(token_id)
        return {"logprob": max(logprob, _LOWEST), "rank": rank, "decoded_token": text}


class CompletionLogprobs:
    """Writes the `logprobs` of one completion's choice, and tracks where each token's text begins.

    A token that is part of a character begins where the character begins.

    Args:
        with_prompt: whether the text begins with the prompt.
    """

    def __init__(self, writer: LogprobWriter, *, with_prompt: bool = False) -> None:
        self._writer = writer
        self._text = writer.text(with_prompt=with_prompt)
        self._shown = 0  # characters of the text that are certain
        self._offset = 0

    def write(self, tokens: Sequence[common_pb2.Token | common_pb2.PromptLogprob]) -> dict[str, Any]:
        """Returns the logprobs of the next tokens; None for a prompt's first token."""
        writer, offsets = self._writer, []
        for token in tokens:
            self._offset = max(self._offset, self._shown + len(self._text.held))
            offsets.append(self._offset)
            self._shown += len(self._text.push(token.token_id))
        known = [token.HasField("logprob") for token in tokens]
        return {
            "tokens": [writer.name(token.token_id) for token in tokens],
            "token_logprobs": [
                max(token.logprob, _LOWEST) if has else None for token, has in zip(tokens, known, strict=True)
            ],
            "top_logprobs": [self._top(token) if has else None for token, has in zip(tokens, known, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, token: common_pb2.Token | common_pb2.PromptLogprob) -> dict[str, float]:
        name = self._writer.name
        top = {name(other.token_id): max(other.logprob, _LOWEST) for other in token.top_logprobs}
        top.setdefault(name(token.token_id), max(token.logprob, _LOWEST))
        return top
