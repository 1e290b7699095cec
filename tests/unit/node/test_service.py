"""The node's status as its watchers get it."""

import asyncio
from unittest.mock import MagicMock

import grpc
import pytest

from baton.node import service
from baton.node.service import NodeService
from baton.protos.internal.v1 import node_pb2 as pb
from baton.protos.v1 import node_status_pb2


async def test_an_unchanged_status_is_sent_again_and_a_changed_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    status = node_status_pb2.NodeStatus(loading=node_status_pb2.Loading(stage="loading weights"))
    node = NodeService(lambda: node_status_pb2.NodeStatus.FromString(status.SerializeToString()))
    context = MagicMock(spec=grpc.aio.ServicerContext)
    watch = node.Watch(pb.WatchRequest(interval_s=0.02, while_loading=True), context)
    async with asyncio.timeout(60):
        monkeypatch.setattr(service, "_REPEAT_S", 0.05)
        assert await anext(watch) == await anext(watch)
        monkeypatch.setattr(service, "_REPEAT_S", 1e9)
        status.loading.done = 1
        assert (await anext(watch)).loading.done == 1
        node.close()
        assert [each async for each in watch] == []
