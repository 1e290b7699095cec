"""Puts the tokens of one request in order, whichever node sampled them: none twice, none missing. Pure."""

from baton.errors import InternalError
from protos.baton.v1 import decode_pb2


class TokenOrder:
    """The tokens passed on so far, and the tokens that arrived before their turn.

    The first token of a hand-over comes from the prefill node and all later ones from the decode node, on another
    connection, which may be faster.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []  # passed on
        self._early: dict[int, decode_pb2.StepToken] = {}

    def offer(self, step_token: decode_pb2.StepToken, *, hold: bool) -> list[decode_pb2.StepToken]:
        """Returns the tokens whose turn it is now; a token that was passed on before is dropped.

        Args:
            hold: the token before this one may still come from another node.

        Raises:
            InternalError: a token is missing, and no node will send it.
        """
        token = step_token.token
        index = token.index
        num_passed = len(self.token_ids)
        if index == num_passed and not self._early:  # nearly every token
            self.token_ids.append(token.token_id)
            return [step_token]
        if index < num_passed:
            return []
        if index > num_passed:
            if not hold:
                raise self._gap(index)
            self._early[index] = step_token
            return []
        ready = [step_token]
        self.token_ids.append(token.token_id)
        while self._early:
            following = self._early.pop(len(self.token_ids), None)
            if following is None:
                raise self._gap(min(self._early))
            ready.append(following)
            self.token_ids.append(following.token.token_id)
        return ready

    def forget_early(self) -> None:
        """Drops the early tokens: the node that sent them does not continue the request."""
        self._early.clear()

    def _gap(self, index: int) -> InternalError:
        return InternalError(
            f"token {index} of the output came when {len(self.token_ids)} was due", field="index", value=index
        )
