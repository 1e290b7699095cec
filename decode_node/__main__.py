"""`python -m decode_node`: one decode node, until SIGTERM."""

from baton.config import DecodeSettings
from decode_node.node import DecodeNode
from decode_node.service import DecodeService
from node.process import run_node
from protos import common_pb2

if __name__ == "__main__":
    run_node(
        "decode_node",
        DecodeSettings,
        common_pb2.ROLE_DECODE,
        lambda node, settings: DecodeService(DecodeNode(node, settings)),
    )
