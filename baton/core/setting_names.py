"""Names of settings in the environment and on the command line, and the location of the running code."""

from pathlib import Path

SOURCE_ROOT = Path(__file__).resolve().parents[2]  # a source tree or site-packages
CLIENT_VARIABLES = (
    "BATON_API_KEY",
    "BATON_CLIENT_CA",
    "BATON_TARGET",
)  # of clients; no process has settings of these names


def variable(name: str) -> str:
    return f"BATON_{name.upper()}"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
