"""The process that renders conversations, each in a fork with limits on CPU time, memory and time.

`baton.gateway.text.chat.renderer` starts it. Only ending a fork stops a template, which may loop or compute the
power of two large numbers.
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
    """Returns the function that renders chats in this process.

    Args:
        facts: the fields of a `Checkpoint`, and the `aliases` of a `ChatModel`.
    """
    fields = {**facts, "special": frozenset(facts["special"])}
    aliases = fields.pop("aliases")
    model = ChatModel(Checkpoint(**fields), aliases)

    def render(_: Mapping[str, Any], content: bytes) -> bytes:
        request = pickle.loads(content)  # safe, because the gateway itself pickled it
        if request is None:
            model.check()
            return b""
        return packed(model.prepare(request))

    return render


if __name__ == "__main__":
    serve(sys.argv[1:], renders)
