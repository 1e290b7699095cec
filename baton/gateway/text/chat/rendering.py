"""The process that renders conversations, each in a fork that a bound of CPU time, memory or time may end.

`baton.gateway.text.chat.renderer` starts it. Nothing interrupts a template: neither a loop nor the power of two large
numbers.
"""

import pickle
import sys
from collections.abc import Mapping
from typing import Any

from baton.bounded.lanes import Work, serve
from baton.gateway.text.chat.checkpoint import Checkpoint
from baton.gateway.text.chat.model import ChatModel
from baton.gateway.text.chat.prepared import packed


def renders(facts: Mapping[str, Any]) -> Work:
    """Makes the work of a process that renders chats.

    Args:
        facts: the fields of a `Checkpoint`, and `aliases` as of `ChatModel`.
    """
    fields = {**facts, "special": frozenset(facts["special"])}
    aliases = fields.pop("aliases")
    model = ChatModel(Checkpoint(**fields), aliases)

    def render(_: Mapping[str, Any], content: bytes) -> bytes:
        request = pickle.loads(content)  # the gateway's own
        if request is None:
            model.check()
            return b""
        return packed(model.prepare(request))

    return render


if __name__ == "__main__":
    serve(sys.argv[1:], renders)
