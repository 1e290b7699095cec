"""Puts the tokens of one request in order, whoever sampled them: none twice, none missing. Pure."""

from baton.errors import InternalError
from protos.baton.v1 import decode_pb2


class TokenOrder:
    """The tokens given so far, and those that came before their turn.

    The first token of a hand-over comes from the prefill node and all later ones from the decode node, on another
    connection: these may be faster.
    """

    def __init__(self) -> None:
        self.given: list[int] = []  # token ids
        self._early: dict[int, decode_pb2.StepToken] = {}

    def offer(self, said: decode_pb2.StepToken, *, hold: bool) -> list[decode_pb2.StepToken]:
        """The tokens whose turn it is now; a token that was given already is dropped.

        Args:
            hold: the token before this one may still come from elsewhere.

        Raises:
            InternalError: a token is missing that nobody is going to send.
        """
        index = said.token.index
        if index < len(self.given):
            return []
        if index > len(self.given):
            if not hold:
                raise self._gap(index)
            self._early[index] = said
            return []
        ready = [said]
        self.given.append(said.token.token_id)
        while self._early:
            following = self._early.pop(len(self.given), None)
            if following is None:
                raise self._gap(min(self._early))
            ready.append(following)
            self.given.append(following.token.token_id)
        return ready

    def forget_early(self) -> None:
        """Whoever sent them will not go on."""
        self._early.clear()

    def _gap(self, index: int) -> InternalError:
        return InternalError(
            f"token {index} of the output came when {len(self.given)} was due", field="index", value=index
        )
