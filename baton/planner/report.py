"""Shows a plan as tables, as JSON, and as the commands that start it. Pure."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.core.types import LocalPolicy
from baton.planner.outcome import SimulatedOutcome
from baton.planner.plan import NOTHING, NodeKind, Option, Plan
from baton.planner.store_capacity import StoreSizes, capacity_lines, store_capacities, store_flags, store_variables

NO_STORES = StoreSizes()


def render(plan: Plan, *, model: str, title: str, costs: str, stores: StoreSizes = NO_STORES) -> Group:
    """The plan as text for a terminal.

    Args:
        title: the load, SLO and GPU of the plan.
        costs: the source of the costs.
        stores: of each node, outside of its cache.
    """
    kind, best = plan.question.kind, plan.best
    lines = [
        f"{title}",
        f"{costs}; a node has {kind.gpus} GPU{'s' if kind.gpus > 1 else ''} and a cache of "
        f"{_thousands(kind.kv_tokens)} tokens of {kind.kv_bytes_per_token / 1024:g} KiB",
        *([f"on each GPU: {kind.memory}"] if kind.memory else []),
        f"a mean request of {plan.demand.prompt:.0f} tokens in and {plan.demand.output:.0f} out takes "
        f"{1e3 * plan.demand.prefill_s:.1f} ms of a prefill node and {1e3 * plan.demand.decode_s:.1f} ms of a decode "
        "node",
        *([f"{kind.drafts}, where that pays"] if kind.drafts.drafted else []),
        *capacity_lines(plan, stores),
    ]
    parts: list[RenderableType] = [*map(Text, lines), Text(), _table(plan, plan.options)]
    others = [*plan.steps, *([plan.strict] if plan.strict else [])]
    if others:
        parts += [Text("\nthe best one with other settings:"), _table(plan, others)]
    parts.append(Text(f"\n{verdict(plan)}"))
    if best.rate > 0:
        parts += [Text(), *(Text(line) for line in commands(plan, model, stores))]
    return Group(*parts)


def verdict(plan: Plan) -> str:
    """The recommendation in one or two sentences."""
    best, question = plan.best, plan.question
    if best.rate == 0:
        return f"No cluster of {plan.nodes} nodes meets {question.goal}: {best.limit} fail even at few requests."
    gpus = plan.nodes * question.kind.gpus
    words = [f"{_name(best)}: {best.rate:.3g} requests per second on {gpus} GPU{'s' if gpus > 1 else ''}"]
    if not best.is_colocated and plan.colocated.rate:
        words.append(f", {best.rate / plan.colocated.rate:.2f} times the colocated nodes")
    words.append(". The search ended there." if best.limit == NOTHING else f". Beyond it, {best.limit} miss the goal.")
    if question.rate is not None:
        room = best.rate / question.rate
        words.append(
            f" {question.rate:g} per second are "
            + (f"{100 / room:.0f} % of it." if room >= 1 else "more than it serves.")
        )
    return "".join(words)


def commands(plan: Plan, model: str, stores: StoreSizes = NO_STORES) -> list[str]:
    """Lines that start the best cluster."""
    best, goal, kind = plan.best, plan.question.goal, plan.question.kind
    spec = best.spec
    bounds = [(name, 1e3 * value) for name, value in (("ttft", goal.ttft_s), ("tpot", goal.tpot_s)) if value]
    slo = "".join(f" --{name}-ms {value:g}" for name, value in bounds)
    variables = "".join(f"BATON_{name.upper()}_MS={value:g} " for name, value in bounds)
    own = _rank_settings(kind)
    ranks_up = f" --tensor-parallel-size {kind.gpus}" if kind.gpus > 1 else ""
    ranks = ranks_up + "".join(f" --{name}{f' {value}' if value else ''}" for name, value in own)
    policy = " --local-policy local" if best.is_colocated else ""
    kept = store_flags(stores)
    variables += store_variables(stores)
    variables += "".join(f"BATON_{name.replace('-', '_').upper()}={value or 'true'} " for name, value in own)
    lines = ["# on one machine; nodes choose their step sizes by a profile at start:"]
    lines.append(
        f"{variables}baton up --model {model} --prefill-nodes {spec.prefills} --decode-nodes {spec.decodes}"
        f"{ranks_up}{policy}"
    )
    lines.append(
        "# or one process for each node, on any machines (PREFILL and DECODE: their addresses, with commas between),"
        " with certificates or --insecure (docs/security.md):"
    )
    if spec.prefills:
        lines.append(
            f"baton prefill-node --model {model} --max-batch-tokens {spec.prefill.step_tokens}{ranks}{kept}"
            f" --listen 0.0.0.0:7001  # {spec.prefills} of them"
        )
    lines.append(
        f"baton decode-node --model {model} --max-batch-tokens {spec.decode.step_tokens}{ranks}{kept}"
        f" --listen 0.0.0.0:7002  # {spec.decodes} of them"
    )
    prefill = "--prefill PREFILL " if spec.prefills else ""
    lines.append(f"baton gateway --model {model} {prefill}--decode DECODE --listen 0.0.0.0:7000{slo}{policy}")
    return lines


def _rank_settings(kind: NodeKind) -> list[tuple[str, str]]:
    """The settings of a node with several ranks, with their values; those without a value are switches."""
    found = [("attention-data-parallel", "")] if kind.own_requests else []
    if kind.own_requests or kind.redundant_experts:
        found.append(("expert-parallel", ""))
    if kind.redundant_experts:
        found.append(("redundant-experts", str(kind.redundant_experts)))
    return found


def to_json(plan: Plan, *, model: str, costs: str, stores: StoreSizes = NO_STORES) -> dict[str, object]:
    """The object that `--json` prints. Rates are requests per second."""
    question, kind = plan.question, plan.question.kind
    return {
        "model": model,
        "costs": costs,
        "goal": str(question.goal),
        "rate": question.rate,
        "serves": plan.serves,
        "gpus": plan.nodes * kind.gpus,
        "nodes": plan.nodes,
        "gpus_per_node": kind.gpus,
        "cache_tokens_per_node": kind.kv_tokens,
        "kv_bytes_per_token": kind.kv_bytes_per_token,
        "memory_per_gpu": None if kind.memory is None else vars(kind.memory),
        "draft_tokens": {"accepted": kind.drafts.accepted, "drafted": kind.drafts.drafted},
        "kept": [vars(capacity) for capacity in store_capacities(plan, stores)],
        "request": {
            "prompt_tokens": plan.demand.prompt,
            "output_tokens": plan.demand.output,
            "prefill_s": plan.demand.prefill_s,
            "decode_s": plan.demand.decode_s,
        },
        "best": _option_json(plan.best),
        "options": [_option_json(option) for option in plan.options],
        "other_steps": [_option_json(option) for option in plan.steps],
        "strict": None if plan.strict is None else _option_json(plan.strict),
        "verdict": verdict(plan),
        "commands": [line for line in commands(plan, model, stores) if not line.startswith("#")]
        if plan.best.rate
        else [],
    }


def _option_json(option: Option) -> dict[str, object]:
    outcome = option.goodput.outcome
    return {
        "prefill": option.spec.prefills,
        "decode": option.spec.decodes,
        "policy": option.spec.policy.value,
        "prefill_step_tokens": option.spec.prefill.step_tokens if option.spec.prefills else None,
        "decode_step_tokens": option.spec.decode.step_tokens,
        "goodput": option.rate,
        "limit": option.limit,
        "prefill_busy": outcome.prefill_busy if option.spec.prefills else None,
        "decode_busy": outcome.decode_busy,
        "ttft_s": {"p50": outcome.ttft_s(0.5), "p90": outcome.ttft_s(0.9), "p99": outcome.ttft_s(0.99)},
        "tpot_s": {"p50": outcome.tpot_s(0.5), "p90": outcome.tpot_s(0.9), "p99": outcome.tpot_s(0.99)},
    }


def _table(plan: Plan, options: Sequence[Option]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("nodes", overflow="fold")
    for name in ("steps", "req/s", "per GPU", "x coloc.", "TTFT p90", "TPOT p90", "busy P/D"):
        table.add_column(name, justify="right")
    table.add_column("limit", overflow="fold")
    gpus, colocated = plan.nodes * plan.question.kind.gpus, plan.colocated.rate
    for option in options:
        spec, outcome = option.spec, option.goodput.outcome
        steps = (
            f"{spec.prefill.step_tokens}/{spec.decode.step_tokens}" if spec.prefills else f"{spec.decode.step_tokens}"
        )
        table.add_row(
            _name(option),
            steps,
            f"{option.rate:.3g}",
            f"{option.rate / gpus:.3g}",
            f"{option.rate / colocated:.2f}" if colocated else "",
            f"{1e3 * outcome.ttft_s(0.9):.0f} ms",
            f"{1e3 * outcome.tpot_s(0.9):.1f} ms",
            _busy(option, outcome),
            option.limit,
            style="bold" if option is plan.best else None,
        )
    return table


def _name(option: Option) -> str:
    spec = option.spec
    if option.is_colocated:
        return f"{spec.decodes} colocated"
    strict = ", strict" if spec.policy is LocalPolicy.STRICT else ""
    return f"{spec.prefills} prefill + {spec.decodes} decode{strict}"


def _busy(option: Option, outcome: SimulatedOutcome) -> str:
    decode = f"{100 * outcome.decode_busy:.0f} %"
    return decode if option.is_colocated else f"{100 * outcome.prefill_busy:.0f} / {decode}"


def _thousands(tokens: int) -> str:
    return f"{tokens / 1e6:.2f}M" if tokens >= 1_000_000 else f"{tokens / 1e3:.0f}k"
