"""Names of settings in the environment and on the command line, and the location of the running code."""

from pathlib import Path
from types import MappingProxyType

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # a source tree or site-packages
CLIENT_VARIABLES = (
    "BATON_API_KEY",
    "BATON_CLIENT_CA",
    "BATON_TARGET",
)  # of clients; no process has settings of these names

# Values that come from variables of other tools: torchrun's, or those of LeaderWorkerSet.
STANDARD_VARIABLES = MappingProxyType(
    {
        "num_hosts": "NNODES or LWS_GROUP_SIZE",
        "host_rank": "NODE_RANK or LWS_WORKER_INDEX",
        "leader_address": "MASTER_ADDR or LWS_LEADER_ADDRESS",
    }
)


def variable(name: str) -> str:
    return f"BATON_{name.upper()}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown(name: str) -> str:
    """A setting as its user knows it."""
    return STANDARD_VARIABLES.get(name) or f"{variable(name)} ({flag(name)})"
