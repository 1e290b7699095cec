"""Reads what the environment has besides settings, and makes the environment of child processes."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.setting_names import CLIENT_VARIABLES, SOURCE_ROOT, variable

_BARE = frozenset({"PATH", "LD_LIBRARY_PATH", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV"})
_BARE_PREFIXES = ("PYTHON", "LC_")


def child_environment(**more: str) -> dict[str, str]:
    """The environment for a child process that runs one of our modules: this process's, changed, plus `more`.

    The child imports nothing from its working directory, where a `models.py` or a folder `gateway` would hide ours. An
    empty entry of PYTHONPATH means the working directory, so it is dropped too.
    """
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if (SOURCE_ROOT / "pyproject.toml").is_file():
        path.append(str(SOURCE_ROOT))  # a source tree is found in the working directory unless it is installed
    return {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path), **more}


def bare_environment(**more: str) -> dict[str, str]:
    """The environment for a child process that works on clients' input: only what an interpreter needs, no keys."""
    return {name: value for name, value in child_environment(**more).items() if name in more or _is_bare(name)}


def _is_bare(name: str) -> bool:
    return name.startswith(_BARE_PREFIXES) or name in _BARE


def use_device_for_gloo(name: str) -> None:
    """Makes gloo connect the ranks of one node over this network device, unless the environment names another.

    By default gloo resolves the host's own name, which can fail in a container.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def disable_nvlink_multicast() -> None:
    """Keeps torch from setting up NVLink multicast for memory that ranks share. None of our kernels uses it."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def quiet_grpc() -> None:
    """Keeps gRPC's core from writing lines of its own to stderr, unless the environment says otherwise.

    The errors that matter reach our own log as errors of calls.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def cache_directory() -> Path | None:
    """Baton's part of the user's cache directory, which need not exist. Returns None if there is no home directory."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if Path(given).is_absolute():  # the standard ignores other values
        return Path(given) / "baton"
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError:
        return None


def visible_gpus() -> int:
    """Number of GPUs that a child process would see."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip() not in ("", "-1")])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))


def ranks_of_each_node() -> int:
    """Ranks of each node that inherits this environment; 1 for a wrong value, which the node itself then refuses."""
    value = os.environ.get(variable("tensor_parallel_size"), "")
    return max(1, int(value)) if value.isdecimal() else 1


@dataclass(frozen=True)
class ClientAccess:
    """How a client reaches a gateway, from the environment: BATON_API_KEY, BATON_CLIENT_CA, BATON_TARGET."""

    api_key: str | None = field(default=None, repr=False)
    tls_ca: str | None = None
    insecure: bool = False
    target: str | None = None


def client_access() -> ClientAccess:
    insecure = os.environ.get(variable("insecure"), "").lower() in ("1", "true", "yes", "on")
    api_key, tls_ca, target = (os.environ.get(name) or None for name in CLIENT_VARIABLES)
    return ClientAccess(api_key, tls_ca, insecure, target)


def proxy_variables() -> dict[str, str]:
    """The variables that name HTTP proxies, and hosts that are reached without one (`baton.core.proxies`)."""
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


def set_client_access(*, api_key: str | None, tls_ca: str | None) -> None:
    """Sets how this process and its children reach gateways; None keeps the environment's value."""
    given = {CLIENT_VARIABLES[0]: api_key, CLIENT_VARIABLES[1]: tls_ca}
    os.environ.update({name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class TlsFiles:
    """The files that BATON_TLS_CERT, BATON_TLS_KEY and BATON_TLS_CA name, for a program without settings."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_ca: Path | None


def environment_tls() -> TlsFiles:
    given = (os.environ.get(variable(name)) for name in ("tls_cert", "tls_key", "tls_ca"))
    return TlsFiles(*(Path(path) if path else None for path in given))


def is_set(name: str) -> bool:
    """Whether the environment has the setting's variable."""
    return variable(name) in os.environ


def opentelemetry_variables() -> dict[str, str]:
    """The variables of OpenTelemetry's standard, such as OTEL_EXPORTER_OTLP_ENDPOINT."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
