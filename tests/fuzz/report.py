"""Writes bench/results/fuzz.md, the table of what was fuzzed, and the figures for it, to which each run adds."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.all import NAMES

_FOLDER = Path(__file__).resolve().parents[2] / "bench" / "results"
_FIGURES = _FOLDER / "fuzz.json"
_PAGE = _FOLDER / "fuzz.md"
_KEPT = 1024
WHAT = {
    "converted": "protobuf to plain values: sampling, SLO, costs, tokens, receipts, warm-ups, addresses",
    "error_details": "errors of peers",
    "hello": "a peer's description, and the plan that follows from it",
    "trailer": "tags and trailers of KV messages",
    "node_messages": "sequences of messages of gateways and prefill nodes to a decode node's machine",
    "config": "config.json, generation_config.json",
    "safetensors": "headers of safetensors files",
    "index": "model.safetensors.index.json",
    "tokenizer": "tokenizer.json, then encode and decode",
    "families": "config.json of every family, then a small model from it",
    "quantization": "quantization_config of every scheme, then a small model with it",
    "adapter": "adapter_config.json and adapter_model.safetensors",
    "tokenizer_forms": "tekken.json, tiktoken.model, tokenizer.model, tokenizer_config.json; then encode and decode",
    "kv_file": "headers and names of files that keep KV, read by the store",
    "addresses": "host:port, lists of nodes",
    "settings": "flags and variables of all processes",
    "keys": "the TOML file of API keys",
    "tokens": "key sets, PEM public keys and secrets; tokens (JWT)",
    "certificates": "PEM certificates and keys, changed outside and inside of their encoding",
    "grammar": "JSON Schema, regular expressions, Lark, GBNF, choices, structural tags; then a few tokens",
    "chat_template": "jinja templates in tokenizer_config.json, and conversations in them",
    "outputs": "tool calls and reasoning in what models write, cut into any pieces",
    "trace": "traces of requests for `baton bench`",
    "gateway_grpc": "all gRPC methods of a gateway, over a socket",
    "gateway_http": "bodies and headers of all HTTP routes",
    "http_bytes": "bytes on an HTTP connection, in any pieces",
    "node_grpc": "all gRPC methods of a decode and a prefill node, over a socket, with a running engine",
}


@dataclass
class Run:
    """What inputs of one target came to.

    Attributes:
        outcomes: digests of 32 bits, sorted; of more than _KEPT the smallest ones, by which `num_outcomes` estimates
            their number (k minimum values).
        findings: messages of failures.
    """

    ends: dict[str, int] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    grown_mib: int = 0
    cpu_s: float = 0.0
    seconds: float = 0.0

    @property
    def inputs(self) -> int:
        return sum(self.ends.values())

    @property
    def num_outcomes(self) -> int:
        """To within 3 % where there are more than _KEPT."""
        if len(self.outcomes) < _KEPT:
            return len(self.outcomes)
        return round((_KEPT - 1) * 2**32 / int(self.outcomes[_KEPT - 1], 16))

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in Counter(self.ends).most_common(4))
        return (
            f"{self.inputs} inputs in {self.seconds:.0f} s ({self.cpu_s:.0f} s of CPU), {self.num_outcomes} outcomes, "
            f"{len(self.findings)} findings, {self.grown_mib} MiB more memory: {ends}"
        )

    def add_worker(self, out: Path) -> None:
        """Adds what a worker wrote."""
        found = json.loads(out.read_text())
        self.add(Run(**found))

    def add(self, other: "Run") -> None:
        self.ends = dict(Counter(self.ends) + Counter(other.ends))
        self.outcomes = sorted({*self.outcomes, *other.outcomes})[:_KEPT]
        self.findings += other.findings
        self.grown_mib = max(self.grown_mib, other.grown_mib)
        self.cpu_s += other.cpu_s
        self.seconds += other.seconds


def known(name: str) -> Run:
    """What the figures have of a target."""
    return Run(**_figures().get(name, {}))


def add(name: str, run: Run) -> None:
    """Adds a run to the figures, and writes the page."""
    figures = _figures()
    total = Run(**figures.get(name, {}))
    total.add(run)
    figures[name] = asdict(total)
    written = {known: {**each, "outcomes": " ".join(each["outcomes"])} for known, each in figures.items()}
    _FIGURES.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    _PAGE.write_text(_page(figures))


def _figures() -> dict[str, Any]:
    """By target. All digests are one text, which makes the file short."""
    figures = json.loads(_FIGURES.read_text()) if _FIGURES.exists() else {}
    return {name: {**each, "outcomes": each["outcomes"].split()} for name, each in figures.items()}


def _page(figures: dict[str, Any]) -> str:
    lines = [
        "# Fuzzing",
        "",
        "`make fuzz COUNT=1000000 REPORT=1` feeds random and changed inputs to every parser until each has had that",
        "many, and writes this page; it goes on where the last run ended. An input passes if it is taken or refused",
        "with an error of ours, within 5 s of CPU time; a process that dies, hangs or grows by a GiB fails. A",
        "different outcome is an error whose message differs in more than values; above 1,024 their number is an",
        "estimate. Inputs that end in a new way are changed further. Failing inputs are kept in tests/fuzz/corpus,",
        "and `make test` runs them all.",
        "",
        "| parser | what is fed to it | inputs | CPU s | inputs per CPU s | taken | outcomes | MiB grown | failures |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in NAMES:
        run = Run(**figures.get(name, {}))
        rate = run.inputs / run.cpu_s if run.cpu_s else 0
        taken = sum(count for end, count in run.ends.items() if end in _TAKEN) / (run.inputs or 1)
        lines.append(
            f"| {name} | {WHAT[name]} | {run.inputs:,} | {run.cpu_s:,.0f} | {rate:,.0f} | {taken:.0%} | "
            f"{run.num_outcomes:,} | {run.grown_mib} | {len(run.findings)} |"
        )
    return "\n".join([*lines, "", *_FOUND]) + "\n"


_TAKEN = ("taken", "silent", "200")
_FOUND = (
    "## Found, and mended",
    "",
    "| parser | input | what it did |",
    "|---|---|---|",
    "| node_messages, node_grpc | an unknown `placement` to a prefill node | ended the gateway's session as INTERNAL |",
    "| grammar | a JSON Schema with half of a surrogate pair | INTERNAL |",
    "| tokens | a key set whose id is not text, nested 5,000 deep; keys of unknown kinds | tracebacks at start |",
    "| certificates | certificates that are PEM and ASN.1, but wrong inside | tracebacks at start |",
    "| keys | a number of 5,000 digits | a traceback at start |",
    "| chat_template | `{% break %}` outside of a loop | a traceback at start |",
    "| settings | control characters in `kv_convert_from` | reached the terminal |",
    "| families | yarn with a base of 1; `block_ffn_dim_multiplier` of 1e308 | tracebacks at start |",
    "| quantization | half of a surrogate pair in a field's name | a traceback at start |",
    "| grammar | `{10 0}` in a regular expression | INTERNAL |",
    "| chat_template | ranges of 100,000 items within macros that call themselves; `lipsum` | minutes of CPU |",
    "| http_bytes | a request on the connection of one with too large headers | waited for its body for ever |",
    "| families | yarn with betas, a factor or scales of 1e308; `ssm_multipliers` of 1e308 | tracebacks at start |",
    "| tokenizer_forms | a piece of tokenizer.model whose text is a number | memory as large as that number |",
)
