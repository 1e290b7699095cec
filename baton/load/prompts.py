"""Makes the contents of prompts: the same plan gives the same tokens, and equal prefix ids give equal prefixes.

Tokens are drawn evenly, so prompts share no prefix by chance. Servers that take only text get common English words, as
many as make the wanted number of tokens by the probe of the target.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from baton.load.workload import PlannedRequest

_CACHED_BLOCKS = 4096
# Most tokenizers have one token for each of these with a space before it.
_TEXT = """
able about above across after again against age ago air all almost along already also always among and animal
another answer any appear area army around arrive art ask away baby back ball bank base be bear beat because become
bed before begin below best better big bird black blood blue board boat body book born both bottom box boy bring
brother brown build burn busy but buy by call came can car card care carry case catch cause center certain chair
chance change check child church circle city class clear close cloud coast cold color come common compare complete
contain control cook cool copy corn corner correct cost could count country course cover create cross cry cut dance
dark day dead deal dear decide deep degree depend design desk develop did differ direct discuss distant divide
doctor does dog dollar done door double down draw dream dress drink drive drop dry during each ear early earth east
eat edge effect egg eight either else end
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Contents:
    """The contents of prompts.

    Args:
        vocabulary: ids of tokens to draw from, from the first to before the second.
        seed: another seed makes other contents for the same plan, so that a server has none of them in its cache.
        tokens_per_word, extra_tokens: a text of n words has n * `tokens_per_word` + `extra_tokens` tokens.
    """

    seed: int = 0
    vocabulary: tuple[int, int] = (256, 1000)
    tokens_per_word: float = 1.0
    extra_tokens: int = 0

    def request_id(self, index: int) -> str:
        """The id of a request of the plan, for logs of the server."""
        return f"bench-{self.seed:x}-{index}"


@dataclass
class PromptMaker:
    """Makes the prompts of one run."""

    contents: Contents
    _blocks: OrderedDict[tuple[int, int], list[int]] = field(default_factory=OrderedDict)

    def token_ids(self, request: PlannedRequest) -> list[int]:
        """Draws `request.prompt_tokens` ids."""
        return self._drawn(request, request.prompt_tokens, request.prefix_tokens, *self.contents.vocabulary)

    def text(self, request: PlannedRequest) -> str:
        """A text of about `request.prompt_tokens` tokens."""
        per_word = self.contents.tokens_per_word
        count = max(1, round((request.prompt_tokens - self.contents.extra_tokens) / per_word))
        drawn = self._drawn(request, count, max(1, round(request.prefix_tokens / per_word)), 0, len(WORDS))
        return " ".join(map(WORDS.__getitem__, drawn))

    def _drawn(self, request: PlannedRequest, count: int, block: int, low: int, high: int) -> list[int]:
        """`count` numbers: `block` for each prefix id, then numbers of this request only."""
        drawn: list[int] = []
        for prefix_id in request.prefix_ids:
            if len(drawn) >= count:
                break
            drawn += self._block(prefix_id, block, low, high)
        missing = count - len(drawn)
        if missing > 0:
            drawn += _numbers((self.contents.seed, 1, request.index), missing, low, high)
        return drawn[:count]

    def _block(self, prefix_id: int, count: int, low: int, high: int) -> list[int]:
        key = (prefix_id, count)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = _numbers((self.contents.seed, 0, prefix_id), count, low, high)
            if len(self._blocks) > _CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        return found


def _numbers(seed: tuple[int, int, int], count: int, low: int, high: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(low, high, count).tolist()
    return drawn
