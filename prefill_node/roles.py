"""The two roles that a node process can have: their settings, and how each is made."""

from collections.abc import Mapping
from types import MappingProxyType

from baton.node.role import RoleKind
from baton.protos.v1 import node_status_pb2
from baton.settings.node_config import DecodeSettings, PrefillSettings
from decode_node.driver import DecodeDriver
from decode_node.service import DecodeService
from prefill_node.service import PrefillService

ROLES: Mapping[node_status_pb2.Role.ValueType, RoleKind] = MappingProxyType(
    {
        node_status_pb2.ROLE_PREFILL: RoleKind(PrefillSettings, PrefillService),
        node_status_pb2.ROLE_DECODE: RoleKind(
            DecodeSettings, lambda node, settings: DecodeService(DecodeDriver(node, settings))
        ),
    }
)
