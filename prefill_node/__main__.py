"""`python -m prefill_node`: one prefill node, until SIGTERM."""

from baton.config import PrefillSettings
from node.process import run_node
from prefill_node.node import PrefillNode
from prefill_node.service import PrefillService
from protos import common_pb2

if __name__ == "__main__":
    run_node(
        "prefill_node",
        PrefillSettings,
        common_pb2.ROLE_PREFILL,
        lambda node, settings: PrefillService(PrefillNode(node, settings)),
    )
