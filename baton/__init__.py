"""The Python client of a Baton gateway, with its types and errors: `from baton import Client`.

Names are imported on first use, so `import baton` loads neither gRPC nor server code.
"""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from baton.core.version import __version__ as __version__

if TYPE_CHECKING:
    from baton.client.client import AsyncClient as AsyncClient
    from baton.client.outputs import ChatDelta as ChatDelta
    from baton.client.outputs import Completion as Completion
    from baton.client.outputs import Event as Event
    from baton.client.outputs import Finished as Finished
    from baton.client.outputs import Notice as Notice
    from baton.client.outputs import Piece as Piece
    from baton.client.outputs import ToolCall as ToolCall
    from baton.client.served import ModelCard as ModelCard
    from baton.client.served import ModelInfo as ModelInfo
    from baton.client.served import ModelRevision as ModelRevision
    from baton.client.sync import Client as Client
    from baton.core.errors import BatonError as BatonError
    from baton.core.errors import Cancelled as Cancelled
    from baton.core.errors import ConfigError as ConfigError
    from baton.core.errors import ContextOverflow as ContextOverflow
    from baton.core.errors import DataLoss as DataLoss
    from baton.core.errors import DeadlineExceeded as DeadlineExceeded
    from baton.core.errors import Draining as Draining
    from baton.core.errors import InternalError as InternalError
    from baton.core.errors import InvalidRequest as InvalidRequest
    from baton.core.errors import NoNode as NoNode
    from baton.core.errors import Overloaded as Overloaded
    from baton.core.errors import PeerRefused as PeerRefused
    from baton.core.errors import PermissionDenied as PermissionDenied
    from baton.core.errors import Unauthenticated as Unauthenticated
    from baton.core.errors import UnknownLease as UnknownLease
    from baton.core.errors import UnknownModel as UnknownModel
    from baton.core.sampling import SamplingParams as SamplingParams
    from baton.core.types import AdapterRef as AdapterRef
    from baton.core.types import FinishReason as FinishReason
    from baton.core.types import Grammar as Grammar
    from baton.core.types import GrammarKind as GrammarKind
    from baton.core.types import LocalPolicy as LocalPolicy
    from baton.core.types import Path as Path
    from baton.core.types import PromptLogprob as PromptLogprob
    from baton.core.types import Receipt as Receipt
    from baton.core.types import Slo as Slo
    from baton.core.types import TokenOutput as TokenOutput
    from baton.core.types import Usage as Usage

_HOMES = MappingProxyType(
    {
        "baton.client.client": ("AsyncClient",),
        "baton.client.outputs": ("ChatDelta", "Completion", "Event", "Finished", "Notice", "Piece", "ToolCall"),
        "baton.client.served": ("ModelCard", "ModelInfo", "ModelRevision"),
        "baton.client.sync": ("Client",),
        "baton.core.errors": (
            "BatonError", "Cancelled", "ConfigError", "ContextOverflow", "DataLoss", "DeadlineExceeded", "Draining",
            "InternalError", "InvalidRequest", "NoNode", "Overloaded", "PeerRefused", "PermissionDenied",
            "Unauthenticated", "UnknownLease", "UnknownModel",
        ),
        "baton.core.sampling": ("SamplingParams",),
        "baton.core.types": (
            "AdapterRef", "FinishReason", "Grammar", "GrammarKind", "LocalPolicy", "Path", "PromptLogprob", "Receipt",
            "Slo", "TokenOutput", "Usage",
        ),
    }
)  # fmt: skip


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*globals(), *(name for names in _HOMES.values() for name in names)))
