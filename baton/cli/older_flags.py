"""What to use instead of a flag that a command does not have: its newer name, or the variable of a setting. Pure."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from baton.core.setting_names import variable
from baton.settings.reader import SETTINGS, cure_of_older

# Flags of commands that older releases had.
_RENAMED: Mapping[str, str] = MappingProxyType(
    {"--tls-ca": "--client-ca", "--prefill": "--prefill-nodes", "--decode": "--decode-nodes"}
)
# Commands with this flag start a cluster, whose other settings come from variables.
_STARTS_CLUSTER = "--prefill-kv-cache-layout"


def cure_of_flag(name: str, flags: Collection[str]) -> str | None:
    """What to do instead of giving this flag. Returns None if nothing is known about its name.

    Args:
        flags: those that the command has.
    """
    if _RENAMED.get(name) in flags:
        return f"use {_RENAMED[name]}"
    if _STARTS_CLUSTER not in flags:
        return None
    setting = name.removeprefix("--").replace("-", "_")
    if setting in SETTINGS:
        return f"set {variable(setting)}"
    cure = cure_of_older(setting, variable)
    return cure and cure.replace("use ", "set ", 1)
