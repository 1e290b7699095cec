"""Real nodes in the test's process: the demo model on a CPU, KV over the loopback transport."""

from functools import partial
from typing import Any

from baton.engine.build import BuiltRunner
from baton.node.assembly import Listener, Node
from baton.node.from_settings import load
from baton.protos.v1 import node_status_pb2
from baton.settings.config import DEMO_MODELS
from baton.settings.node_config import DecodeSettings, PrefillSettings

SETTINGS = {
    "model": str(DEMO_MODELS / "llama"),
    "device": "cpu",
    "transport": "loopback",
    "num_blocks": 64,
    "segment_mib": 0.25,
}


def decode_settings(**values: object) -> DecodeSettings:
    return DecodeSettings.model_validate(SETTINGS | values)


def load_demo() -> BuiltRunner:
    return load(decode_settings())


def decode_node(built: BuiltRunner, settings: DecodeSettings) -> Node:
    """A node that is not entered yet, so that a role can register its listener."""
    return Node(settings, built, role=node_status_pb2.ROLE_DECODE, address="127.0.0.1:1")


def prefill_node(built: BuiltRunner, *, address: str = "127.0.0.1:2") -> Node:
    """A node that only sends KV: its engine's steps are ignored."""
    settings = PrefillSettings.model_validate(SETTINGS)
    node = Node(settings, built, role=node_status_pb2.ROLE_PREFILL, address=address)
    ignore: Any = partial(lambda event: None)
    node.listen(Listener(on_step=ignore, on_filled=ignore, on_refused=ignore))
    return node
