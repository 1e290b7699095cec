"""Reads the settings of one process from its flags and the environment, and reports a mistake in one line."""

import argparse
import os
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from baton.core.errors import ConfigError, shortened
from baton.core.log_lines import escaped
from baton.core.logs import write_in_background, write_line
from baton.core.setting_names import CLIENT_VARIABLES, STANDARD_VARIABLES, flag, shown, variable
from baton.core.supervisor import Supervisor
from baton.settings.config import ProcessSettings
from baton.settings.gateway_config import GatewaySettings, PickerSettings
from baton.settings.internal import settings_of
from baton.settings.node_config import LEADER_PORT, DecodeSettings, NodeSettings, PrefillSettings

_PREFIX = "BATON_"
_ROLES: Mapping[type[BaseModel], str] = MappingProxyType(
    {
        PrefillSettings: "a prefill node",
        DecodeSettings: "a decode node",
        GatewaySettings: "a gateway",
        PickerSettings: "an endpoint picker",
    }
)
SETTINGS = frozenset(name for cls in _ROLES for name in settings_of(cls))
_REPEATABLE = frozenset({"adapter"})  # several flags mean one value, comma-separated
_SHOWN_MAX = 200  # characters of a wrong value
# Least similarity, of 1, without the prefix. BLOKSIZE and CACHE_LAYOUT are above, LOG_FORMAT, NODE_NAME and DEVICE_ID
# below.
_ALIKE = 0.87
_OUT_OF_RANGE = ("greater_than_equal", "less_than_equal", "finite_number")
_UNIT = re.compile(r"_(MS|S|MIB|GIB|GB_PER_S)$")

Settings = TypeVar("Settings", bound=ProcessSettings)
NodeRole = TypeVar("NodeRole", bound=NodeSettings)


# The groups in which `--help` shows the settings of a role, most used first.
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "nodes and model",
        ("model", "prefill", "decode", "pool", "model_name", "max_context_tokens", "chat_template", "local_policy",
         "unknown_fields"),
    ),
    ("addresses", ("listen", "http_listen", "name", "advertise", "metrics_listen", "health_listen", "workers")),
    ("device and model", ("device", "dtype", "threads", "load_format", "model_revision")),
    (
        "KV cache",
        ("kv_cache_layout", "block_size", "gpu_memory_fraction", "kv_cache_mib", "kv_cache_dtype", "prefix_cache",
         "host_cache_gib", "file_cache_dir", "file_cache_gib", "kv_store"),
    ),
    (
        "steps",
        ("max_batch_tokens", "max_batch_requests", "attention_backend", "cuda_graphs", "batch_invariant",
         "speculation", "draft_head", "also_decodes"),
    ),
    (
        "latency and load",
        ("ttft_ms", "tpot_ms", "gap_factor", "ttft_factor", "refuse_late", "max_queue_s", "max_concurrent_requests",
         "request_timeout_s", "response_store_mib", "balance_roles", "sheddable", "pool_metrics_port"),
    ),
    (
        "several ranks",
        ("tensor_parallel_size", "expert_parallel", "attention_data_parallel", "redundant_experts", "expert_load"),
    ),
    ("adapters", ("adapter", "max_adapters", "max_adapter_rank")),
    (
        "transfer",
        ("transport", "topology", "kv_convert_from", "link_floor_gb_per_s", "receive_limit_gb_per_s", "segment_mib"),
    ),
    (
        "clients and their rights",
        ("api_keys", "cors_origins", "client_tls_cert", "client_tls_key", "jwt_keys", "jwt_audience", "jwt_issuer",
         "user_special_tokens", "kv_events"),
    ),
    ("TLS inside the cluster", ("tls_cert", "tls_key", "tls_ca", "insecure")),
    (
        "logs, traces, end",
        ("log_level", "log_format", "access_log", "drain_grace_s",
         "ready_file"),
    ),
)  # fmt: skip


def in_groups(cls: type[BaseModel]) -> list[tuple[str, tuple[str, ...]]]:
    """The settings of one role, by the title of their group."""
    settings = settings_of(cls)
    grouped = [(title, tuple(name for name in names if name in settings)) for title, names in GROUPS]
    return [(title, names) for title, names in grouped if names]


# Settings of older releases, so that an error names what to use instead of them.
RENAMED = MappingProxyType({"adapter_directory": "adapter", "num_blocks": "kv_cache_mib", "queue_s": "max_queue_s"})
REPLACED = MappingProxyType(
    {
        "adapter_experts": "leave it out: a node has room for experts if it finds an adapter of experts at its start",
        "fallbacks": "leave it out: proxies take a list of gateways since version 0.4 of the endpoint picker protocol",
        "host_rank": "set NODE_RANK",
        "leader_address": "set MASTER_ADDR and MASTER_PORT",
        "num_hosts": "set NNODES",
        "otlp_endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT",
        "trace_sample": "set OTEL_TRACES_SAMPLER_ARG",
        "trace_slow_s": "leave it out: traces of requests that miss their TTFT or TPOT are exported",
    }
)
# Measured, derived or constant now.
REMOVED = frozenset(
    {
        "balance_backlog_s", "balance_cool_down_s", "balance_hold_s", "connect_timeout_s", "decode_stall_s", "digests",
        "failover_wait_s", "http_body_mib", "keepalive_s", "layer_groups", "lease_s", "link_retry_s",
        "local_prefill_tokens", "max_attempts", "max_waiting", "poll_s", "prefill_stall_s", "resolve_s", "shed_waiting",
        "staging_slots", "stale_s", "state_slots",
    }
)  # fmt: skip


def cure_of_older(name: str, spelt: Callable[[str], str]) -> str | None:
    """What to do instead of setting this name. Returns None if no older release had it.

    Args:
        spelt: makes a flag or a variable of a setting's name.
    """
    if name in RENAMED:
        return f"use {spelt(RENAMED[name])}"
    if name in REPLACED:
        return REPLACED[name]
    return "leave it out: this release measures it or keeps it constant" if name in REMOVED else None


def read_settings(cls: type[Settings], program: str, argv: list[str] | None = None) -> Settings:
    """Reads one process's settings from flags and environment. A wrong value ends the process with exit code 2."""
    write_in_background("stderr")
    flags = _parser(cls, program).parse_args(argv)
    given: dict[str, Any] = {
        name: ",".join(value) if name in _REPEATABLE else value
        for name, value in vars(flags).items()
        if value is not None
    }
    if wrong := wrong_variables(os.environ):
        for name, cure in wrong.items():
            write_line(f"{program}: {name} is not a setting; {cure}")
        raise SystemExit(2)
    if issubclass(cls, NodeSettings):
        given = hosts_of(os.environ) | given
    try:
        return cls(**given)
    except ValidationError as error:
        for line in describe_validation_error(cls, error):
            write_line(f"{program}: {line}")
        raise SystemExit(2) from None


def in_role(settings: NodeSettings, cls: type[NodeRole]) -> NodeRole:
    """The settings of the same node in another role: settings of both roles are kept, and those that only the other
    role has come from their variables.

    Raises:
        ConfigError: a variable has a wrong value.
    """
    try:
        return cls(**{name: getattr(settings, name) for name in NodeSettings.model_fields})
    except ValidationError as error:
        lines = describe_validation_error(cls, error)
        raise ConfigError("; ".join(lines), cure="correct the node's variables, and restart it") from None


def wrong_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the environment that nearly have the name of a setting of some process, or had it in an older
    release, each with its cure.

    Variables with other names after our prefix are none of ours: Kubernetes sets some for a service named `baton`.
    """
    known = {variable(name) for name in SETTINGS} | {*CLIENT_VARIABLES}
    ends = {name.removeprefix(_PREFIX): name for name in sorted(known)}
    ends |= {_UNIT.sub("", end): name for end, name in ends.items() if _UNIT.sub("", end) not in ends}
    found = {}
    for name in environ:
        if not name.startswith(_PREFIX) or name.upper() in known:
            continue
        end = name.removeprefix(_PREFIX)
        if (cure := cure_of_older(end.lower(), variable)) is not None:
            found[name] = cure
        elif nearest := get_close_matches(end, ends, n=1, cutoff=_ALIKE):
            found[shortened(name, _SHOWN_MAX)] = f"did you mean {ends[nearest[0]]}?"
    return found


def hosts_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The hosts of a node from the variables of LeaderWorkerSet or torchrun. Empty on one host; NNODES=1 makes one host
    of each pod of a LeaderWorkerSet."""
    size, rank = environ.get("LWS_GROUP_SIZE", ""), environ.get("LWS_WORKER_INDEX", "")
    leader, port = environ.get("LWS_LEADER_ADDRESS", ""), str(LEADER_PORT)
    if not size or environ.get("NNODES") == "1":
        size, rank = environ.get("NNODES", ""), environ.get("NODE_RANK", "")
        leader, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", port)
    if size in ("", "1"):
        return {}
    found = {"num_hosts": size, "host_rank": rank, "leader_address": f"{leader}:{port}" if leader else ""}
    return {name: value for name, value in found.items() if value}


def fail(program: str, error: ConfigError, supervisor: Supervisor | None = None) -> NoReturn:
    """Ends the process because a setting proved wrong after start: one line, exit code 2."""
    write_error(program, error, supervisor)
    raise SystemExit(2)


def write_error(program: str, error: ConfigError, supervisor: Supervisor | None = None) -> None:
    """Writes the line about a setting that proved wrong after start.

    Args:
        supervisor: shows the line in place of this process, once for all processes that have the same fault.
    """
    text = str(error)
    if error.field in SETTINGS | STANDARD_VARIABLES.keys() and text.startswith(f"{error.field} "):
        text = f"{shown(error.field)}{text.removeprefix(error.field)}"
    if supervisor is None or not supervisor.failed(text):
        write_line(f"{program}: {text}")


def describe_validation_error(cls: type[ProcessSettings], error: ValidationError) -> list[str]:
    """One line per wrong value: variable and flag, the value, what is allowed."""
    lines = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else "?"
        where = shown(name) if name in cls.model_fields else variable(name)
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in _OUT_OF_RANGE and (bounds := bounds_of(cls.model_fields[name])):
            message += f"; allowed: {bounds[0]:.12g} to {bounds[1]:.12g}"
        allowed = shortened(escaped(message[:1].lower() + message[1:]), _SHOWN_MAX)
        lines.append(f"{where} is {shortened(repr(item['input']), _SHOWN_MAX)}; {allowed}")
    return lines


def bounds_of(info: FieldInfo) -> tuple[float, float] | None:
    """The least and the greatest value of a setting that is a number."""
    least = next((each.ge for each in info.metadata if isinstance(each, Ge)), None)
    greatest = next((each.le for each in info.metadata if isinstance(each, Le)), None)
    if not isinstance(least, int | float) or not isinstance(greatest, int | float):
        return None
    return least, greatest


class _Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line; argparse would print the names of all flags first."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = super().parse_known_args(args, namespace)
        for text in unknown:
            name = text.partition("=")[0]
            older = name.removeprefix("--").replace("-", "_") if name.startswith("--") else ""
            if (cure := cure_of_older(older, flag)) is not None:
                self.error(f"{name} is not a flag; {cure}")
            if other := _role_of(older):
                self.error(f"{name} is a flag of {other}, not of {self.prog}")
            nearest = get_close_matches(name, self._option_string_actions, n=1) if name.startswith("--") else []
            self.error(f"{name} is not a flag" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        return given, unknown

    def error(self, message: str) -> NoReturn:
        write_line(f"{self.prog}: {shortened(escaped(message), _SHOWN_MAX)}; --help shows all flags")
        raise SystemExit(2)


def _role_of(name: str) -> str:
    """The roles that have this setting, in words; empty: none."""
    return " or ".join(role for cls, role in _ROLES.items() if name in settings_of(cls))


def _parser(cls: type[ProcessSettings], program: str) -> argparse.ArgumentParser:
    """The parser of one process's flags, in groups, most used first."""
    parser = _Parser(
        prog=program,
        description=f"{cls.__doc__} Each flag is also a variable: --block-size is BATON_BLOCK_SIZE.",
        usage="%(prog)s [FLAGS]",
    )
    settings = settings_of(cls)
    for title, names in in_groups(cls):
        group = parser.add_argument_group(title)
        for name in names:
            info = settings[name]
            default = "" if info.default is None or info.default == "" else f" (default: {info.default})"
            help_text = f"{info.description}{default}".replace("%", "%%")
            # A switch may stand alone: --insecure is --insecure true.
            options: dict[str, Any] = {"nargs": "?", "const": "true"} if info.annotation is bool else {}
            options |= {"action": "append"} if name in _REPEATABLE else {}
            group.add_argument(flag(name), dest=name, default=None, metavar="VALUE", help=help_text, **options)
    parser.add_argument("--supervisor", default=None, help=argparse.SUPPRESS)  # from `baton up`
    return parser


def settings_table(cls: type[ProcessSettings]) -> list[tuple[str, str, str, str]]:
    """Rows of flag, variable, default and meaning, for docs/configuration.md."""
    rows = []
    for name, info in settings_of(cls).items():
        default = info.default
        shown = "" if default is None else "the bundled demo Llama" if name == "model" else str(default)
        rows.append((flag(name), variable(name), shown, info.description or ""))
    return rows
