"""Where a node is, as its setting says: labels of its groups, from the widest to the narrowest. Pure."""

import re

from baton.core.errors import shortened
from baton.core.limits import TOPOLOGY_LABELS_MAX
from baton.settings.config import listed

_LENGTH_MAX = 256
_SHOWN = 40  # characters of a wrong label in its error
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


def read_topology(given: str) -> tuple[str, ...]:
    """Reads a list of `name=value`. Labels without a value are left out: a manifest may name what a cluster lacks.

    Raises:
        ValueError: a label is wrong or comes twice, or there are too many.
    """
    labels: dict[str, str] = {}
    for each in listed(given):
        name, found, value = (part.strip() for part in each.partition("="))
        if not found or not _NAME.fullmatch(name) or not value.isprintable() or len(each) > _LENGTH_MAX:
            raise ValueError(
                f"{shortened(each, _SHOWN)!r} is not a label; allowed: name=value of at most {_LENGTH_MAX} printable "
                "characters, where the name has letters, digits, '.', '_', '/' and '-'"
            )
        if name in labels:
            raise ValueError(f"{name!r} is named twice; allowed: each name once")
        labels[name] = value
    known = tuple(f"{name}={value}" for name, value in labels.items() if value)
    if len(known) > TOPOLOGY_LABELS_MAX:
        raise ValueError(f"{len(known)} labels are too many; allowed: at most {TOPOLOGY_LABELS_MAX}")
    return known
