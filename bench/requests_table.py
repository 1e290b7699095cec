"""Every request of a load run as one table, and how far the prediction of its first token was off, by route.

`python -m bench.requests_table RUN.json [TABLE.csv]` reads what `baton bench --json` wrote, prints the quantiles as
Markdown and writes a row for each request. Parts of the time to the first token are those of the request's receipt, on
the clocks of gateway and nodes; times of tokens are the client's.
"""

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.core.errors import InvalidRequest
from baton.load.records import LoadRecord
from baton.load.results import Run, read_results

Cells = dict[str, Any]

QUANTILES = (0.5, 0.9, 0.99)
# Rows of the printed table: numbers of requests whose quantiles say most. Errors are shares, all others milliseconds.
SUMMARIZED = (
    "predicted_ttft_ms", "gateway_ttft_ms", "error", "error_size", "queue_ms", "prefill_ms", "rest_ms", "transfer_ms",
    "client_ttft_ms", "step_ms", "second_ms", "gap_p99_ms", "gap_max_ms",
)  # fmt: skip
ALL_ROUTES = "all"


def to_cells(run: Run, record: LoadRecord) -> Cells:
    """One row of the table. A cell is None if the request has no such number, as after a failure.

    - error, error_size: the predicted time to the first token over the measured one at the gateway, less 1; its size
    - rest_ms: what waiting and computation leave of the measured one: messages, and how long the first token was held
    - transfer_ms: from the first token to admission on the decode node, part of the second token's gap
    - step_ms: the mean time per token; second_ms: the gap before the second token
    """
    receipt: Mapping[str, Any] = record.receipt
    queue, prefill, transfer, ttft, predicted = (
        _ms(receipt.get(name)) for name in ("queue_s", "prefill_s", "transfer_s", "ttft_s", "predicted_ttft_s")
    )
    error = predicted / ttft - 1 if predicted is not None and ttft else None
    gaps = record.gaps_s()
    return {
        "run": f"{run.label} {run.rate:g}/s seed {run.seed}",
        "index": record.index,
        "id": record.request_id,
        "outcome": record.outcome.value,
        "route": str(receipt.get("path", "")),
        "prefill_node": receipt.get("prefill_node", ""),
        "decode_node": receipt.get("decode_node", ""),
        "prompt_tokens": record.usage.get("prompt", record.prompt_tokens),
        "cached_tokens": record.usage.get("cached", 0),
        "output_tokens": record.tokens,
        "due_ms": 1e3 * record.due_s,
        "predicted_ttft_ms": predicted,
        "gateway_ttft_ms": ttft,
        "error": error,
        "error_size": None if error is None else abs(error),
        "queue_ms": queue,
        "prefill_ms": prefill,
        "rest_ms": None if ttft is None else ttft - (queue or 0.0) - (prefill or 0.0),
        "transfer_ms": transfer,
        "client_ttft_ms": _ms(record.ttft_s),
        "step_ms": _ms(record.tpot_s),
        "second_ms": _ms(gaps[0] if gaps.size else None),
        "gap_p99_ms": _ms(record.gap_quantile_s(0.99)),
        "gap_max_ms": _ms(gaps.max() if gaps.size else None),
    }


def _ms(seconds: Any) -> float | None:
    return None if seconds is None else 1e3 * float(seconds)


def quantile_lines(table: Sequence[Cells]) -> Iterator[str]:
    """Yields a Markdown table of the counted requests: quantiles of each number, for each route and for all."""
    routes = sorted({row["route"] for row in table if row["route"]})
    yield f"| route | requests | | {' | '.join(f'p{100 * each:g}' for each in QUANTILES)} |"
    yield f"|---|---|---|{'---|' * len(QUANTILES)}"
    for route in (ALL_ROUTES, *(routes if len(routes) > 1 else ())):
        rows = [row for row in table if route in (ALL_ROUTES, row["route"])]
        for name in SUMMARIZED:
            values = [row[name] for row in rows if row[name] is not None]
            if values:
                found = " | ".join(_text(name, value) for value in np.quantile(values, QUANTILES))
                yield f"| {route} | {len(values)} | {name} | {found} |"


def _text(name: str, value: float) -> str:
    return f"{100 * value:.0f} %" if name.startswith("error") else f"{value:.1f}"


def write_csv(table: Sequence[Cells], path: Path) -> None:
    """Writes all rows, with three decimals."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]) if table else [])
        writer.writeheader()
        writer.writerows(
            {name: round(cell, 3) if isinstance(cell, float) else cell for name, cell in row.items()} for row in table
        )


def main(arguments: Sequence[str]) -> None:
    if not 1 <= len(arguments) <= 2:
        sys.exit("give RUN.json of `baton bench --json`, and perhaps a TABLE.csv to write")
    try:
        results = read_results(Path(arguments[0]))
    except InvalidRequest as error:
        sys.exit(str(error))
    table = [to_cells(run, record) for run in results.runs for record in run.counted]
    if not table:
        sys.exit(f"{arguments[0]} has no requests: a search keeps only its rates; measure one rate")
    print("\n".join(quantile_lines(table)))
    if len(arguments) > 1:
        write_csv(table, Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
