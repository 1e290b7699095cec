"""Writes docs/configuration.md and the README's tables from the settings classes; `make docs` calls it."""

from pathlib import Path

from baton.config import CommonSettings, DecodeSettings, GatewaySettings, NodeSettings, PrefillSettings, settings_table

PAGE = Path(__file__).resolve().parent / "configuration.md"
README = PAGE.parent.parent / "README.md"
BEGIN, END = "<!-- settings, made by `make docs` -->\n", "<!-- end of settings -->\n"

_INTRODUCTION = """# Configuration

Every setting is a flag and a variable of the same name; the flag wins. `--help` of each process prints its own.
A wrong value is one line on stderr that names the setting, the value and what is allowed, and exit code 2.

The KV layout is found in this order: `--kv-cache-layout`, then `BATON_KV_CACHE_LAYOUT`, then what the transport or the
attention backend prefers, then `NHD`. MLA caches have no head axis: for them `NHD` and `HND` mean `LBNC`.

This page is made from the settings classes by `make docs`.
"""

_SECTIONS: tuple[tuple[str, type[CommonSettings], type[CommonSettings] | None], ...] = (
    ("Every process", CommonSettings, None),
    ("Prefill and decode nodes (`python -m prefill_node`, `python -m decode_node`)", NodeSettings, CommonSettings),
    ("Prefill nodes only", PrefillSettings, NodeSettings),
    ("Decode nodes only", DecodeSettings, NodeSettings),
    ("Gateway (`python -m gateway`)", GatewaySettings, CommonSettings),
)


def page() -> str:
    """The page's text."""
    return "\n".join([_INTRODUCTION, *_tables("##")])


def readme() -> str:
    """The README with its tables as they should be."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(_tables("###")) + "\n" + END + after


def _tables(heading: str) -> list[str]:
    tables = []
    for title, cls, inherited in _SECTIONS:
        known = set(inherited.model_fields) if inherited else set()
        rows = [row for name, row in zip(cls.model_fields, settings_table(cls), strict=True) if name not in known]
        lines = [f"| `{flag}` | `{variable}` | {default} | {meaning} |" for flag, variable, default, meaning in rows]
        head = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
        tables.append("\n".join([f"{heading} {title}", "", *head, *lines, ""]))
    return tables


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(readme())
