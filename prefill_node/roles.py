"""The two roles that a node process can have: their settings, and how each is made."""

from collections.abc import Mapping
from types import MappingProxyType

from baton.node.role import RoleKind
from baton.protos.v1 import common_pb2
from baton.settings.node_config import DecodeSettings, PrefillSettings
from decode_node.driver import DecodeDriver
from decode_node.service import DecodeService
from prefill_node.service import PrefillService

ROLES: Mapping[common_pb2.Role.ValueType, RoleKind] = MappingProxyType(
    {
        common_pb2.ROLE_PREFILL: RoleKind(PrefillSettings, PrefillService),
        common_pb2.ROLE_DECODE: RoleKind(
            DecodeSettings, lambda node, settings: DecodeService(DecodeDriver(node, settings))
        ),
    }
)
