"""Writes docs/configuration.md from the settings classes; `make docs` calls it."""

from pathlib import Path

from baton.settings.config import CommonSettings, ProcessSettings
from baton.settings.gateway_config import GatewaySettings, PickerSettings
from baton.settings.node_config import DecodeSettings, NodeSettings, PrefillSettings
from baton.settings.reader import settings_table

PAGE = Path(__file__).resolve().parent / "configuration.md"

_INTRODUCTION = """# Configuration

Each setting is a flag and a variable of the same name; the flag wins. `--help` of a process prints its settings. A
wrong value ends the process with exit code 2 and one line on stderr, which names the setting, its value and the allowed
values. Every number has a minimum and a maximum.

Each process is a command of `baton` and a Python module: `baton prefill-node` is `python -P -m prefill_node`. With
`-P`, Python does not import modules of the working directory, where an `attention.py` or a folder `baton` would hide
Baton's own. The images set `PYTHONSAFEPATH=1` instead, as `baton` does for every process that it starts.

The KV layout is the first of these that is set: `--kv-cache-layout`, `BATON_KV_CACHE_LAYOUT`, the preference of the
transport or the attention backend, `NHD`. MLA caches have no head axis; for them `NHD` and `HND` mean `LBNC`.

`make docs` writes this page from the settings classes.
"""

_SECTIONS: tuple[tuple[str, type[ProcessSettings], type[ProcessSettings] | None], ...] = (
    ("Every process", ProcessSettings, None),
    ("Gateways and nodes", CommonSettings, ProcessSettings),
    (
        "Prefill and decode nodes (`baton prefill-node`, `baton decode-node`)",
        NodeSettings,
        CommonSettings,
    ),
    ("Prefill nodes only", PrefillSettings, NodeSettings),
    ("Decode nodes only", DecodeSettings, NodeSettings),
    ("Gateway (`baton gateway`)", GatewaySettings, CommonSettings),
    ("Endpoint picker (`baton picker`)", PickerSettings, ProcessSettings),
)


def page() -> str:
    """The page's text."""
    return "\n".join([_INTRODUCTION, *(_section(*section) for section in _SECTIONS)])


def _section(title: str, cls: type[ProcessSettings], inherited: type[ProcessSettings] | None) -> str:
    known = settings_table(inherited) if inherited else []
    rows = [row for row in settings_table(cls) if row not in known]
    lines = [f"| `{flag}` | `{variable}` | {default} | {meaning} |" for flag, variable, default, meaning in rows]
    return "\n".join([f"## {title}", "", "| flag | variable | default | meaning |", "|---|---|---|---|", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
