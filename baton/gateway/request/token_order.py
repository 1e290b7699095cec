"""Puts the tokens of one request in order, whichever node sampled them: none twice, none missing. Pure."""

from collections.abc import Iterable, Iterator

from baton.core.errors import InternalError
from baton.protos.internal.v1 import decode_pb2


class TokenOrder:
    """The tokens passed on so far, and the tokens that arrived before their turn.

    The first token of a hand-over comes from the prefill node and all later ones from the decode node, on another
    connection, which may be faster.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # passed on
        self._early: dict[int, decode_pb2.StepToken] = {}

    def offer(self, step_tokens: Iterable[decode_pb2.StepToken], *, hold: bool) -> Iterator[decode_pb2.StepToken]:
        """Yields the tokens whose turn it is, once they are passed on; a token that was passed on before is dropped.

        Args:
            hold: the token before the first one may still come from another node.

        Raises:
            InternalError: a token is missing, and no node will send it.
        """
        token_ids, early = self.token_ids, self._early
        for step_token in step_tokens:
            token = step_token.token
            index, num_passed = token.index, len(token_ids)
            if index == num_passed:
                token_ids.append(token.token_id)
                yield step_token
                if early:  # rare
                    yield from self._follow()
            elif index > num_passed:
                if not hold:
                    raise self._gap(index)
                early[index] = step_token

    def _follow(self) -> Iterator[decode_pb2.StepToken]:
        """The early tokens, whose turn it is now."""
        while self._early:
            following = self._early.pop(len(self.token_ids), None)
            if following is None:
                raise self._gap(min(self._early))
            self.token_ids.append(following.token.token_id)
            yield following

    def forget_early(self) -> None:
        """Drops the early tokens: the node that sent them does not continue the request."""
        self._early.clear()

    def _gap(self, index: int) -> InternalError:
        return InternalError(
            f"token {index} of the output came when {len(self.token_ids)} was due", field="index", value=index
        )
