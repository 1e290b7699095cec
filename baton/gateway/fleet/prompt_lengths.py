"""Estimates the length of the prompts that make up most of the prompt work. Pure: lengths in, a length out.

Steps that also decode compute a prompt in slices, and so a long prompt much later. The choice of nodes must know how
long the other prompts are that a node will get.
"""

# Weight of the newest prompt, and so of about the last 64 prompts.
_NEWEST = 1 / 64


class PromptLengths:
    """The mean length of the prompt that a token belongs to, over all tokens of the latest prompts.

    A few long prompts have more tokens than many short ones, so the mean over tokens and not over prompts counts.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._squares = 0.0

    def add(self, tokens: int) -> None:
        """Records a prompt with so many tokens to be computed."""
        self._tokens += _NEWEST * (tokens - self._tokens)
        self._squares += _NEWEST * (tokens * tokens - self._squares)

    @property
    def typical(self) -> int:
        """The mean; 0 before the first prompt."""
        return round(self._squares / self._tokens) if self._tokens else 0
