"""Parses a gateway's view of its cluster (`Operations.ClusterView`) for `baton top`.

Missing fields have defaults and unknown ones are ignored, so gateways of other versions can be shown too. Clients and
nodes choose some of the texts, so control characters are removed from all of them.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from baton.core.errors import InternalError
from baton.core.log_lines import printable

_NAME_MAX, _TEXT_MAX = 128, 600

Name = Annotated[str, AfterValidator(lambda text: printable(text, _NAME_MAX))]
Sentence = Annotated[str, AfterValidator(lambda text: printable(text, _TEXT_MAX))]


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ShownStore(_Shown):
    """Host memory or a store below it, where a node keeps KV outside of its cache."""

    name: Name = ""
    bytes: int = 0
    tokens_read: int = 0


class ShownNode(_Shown):
    """A node as the gateway sees it; `step_s` is the predicted time of a decode step with its present requests."""

    name: Name = ""
    address: Name = ""
    role: Name = ""
    state: Name = ""
    detail: Sentence = ""
    version: Name = ""
    revision: Name = ""
    revision_name: Name = ""
    running: int = 0
    waiting: int = 0
    rows: int = 0
    seats: int = 0
    backlog_s: float = 0.0
    step_s: float | None = None
    blocks: int = 0
    blocks_free: int = 0
    stores: tuple[ShownStore, ...] = ()


class ShownLink(_Shown):
    """A prefill node's link to a decode node.

    Attributes:
        prefill, decode: indices into the view's nodes; None if the gateway does not know the node.
    """

    prefill: int | None = None
    decode: int | None = None
    peer: Name = ""
    state: Name = ""
    transport: Name = ""
    gigabytes_per_s: float = 0.0
    latency_s: float = 0.0
    bytes_total: int = 0
    detail: Sentence = ""


class ShownReceipt(_Shown):
    path: Name = ""


class ShownRequest(_Shown):
    """A request that has ended; `slow` lists why it was slow or failed."""

    request_id: Name = ""
    client: Name = ""
    outcome: Name = ""
    ended_at_s: float = 0.0
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    slow: tuple[Sentence, ...] = ()
    receipt: ShownReceipt | None = None


class Totals(_Shown):
    running: int = 0
    waiting: int = 0
    finished: int = 0
    failed: int = 0
    refused: int = 0
    remote: int = 0
    local: int = 0
    workers: int = 1


class ShownWorker(_Shown):
    """One process of the gateway in the last seconds; `limit_tokens_per_s` is None while it has too little work."""

    busy_share: float = 0.0
    tokens_per_s: int = 0
    limit_tokens_per_s: int | None = None


class Charts(_Shown):
    """Time series: one value per window, the newest last; None if nothing happened in the window."""

    window_s: float = 0.0
    ttft_p50: tuple[float | None, ...] = ()
    ttft_p99: tuple[float | None, ...] = ()
    gap_p50: tuple[float | None, ...] = ()
    gap_p99: tuple[float | None, ...] = ()
    tokens_per_s: tuple[float | None, ...] = ()


class ClusterView(_Shown):
    """The whole view; `now_s` is the gateway's Unix time."""

    now_s: float = 0.0
    gateway: Name = ""
    model: Name = ""
    version: Name = ""
    draining: bool = False
    mixed: Sentence = ""
    totals: Totals = Totals()
    workers: tuple[ShownWorker, ...] = ()
    nodes: tuple[ShownNode, ...] = ()
    links: tuple[ShownLink, ...] = ()
    charts: Charts = Charts()
    requests: tuple[ShownRequest, ...] = ()


def read_view(text: str) -> ClusterView:
    """Parses the JSON that a gateway returned.

    Raises:
        InternalError: the JSON is not a cluster view.
    """
    try:
        return ClusterView.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the whole view"
        raise InternalError(
            f"cannot read the gateway's view: {where}: {first['msg']}",
            cure="use a `baton` of the gateway's version",
        ) from None
