"""What a gateway shows of its cluster (`Operations.ClusterView`), read for `baton top`.

Fields that are not there have a default and others are ignored, so that gateways of other versions are shown too. Texts
come from whoever named a node or sent a request: none of them has a character that a terminal would obey.
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


class ShownNode(_Shown):
    """A node as the gateway sees it; `step_s`: of a decode step of its present requests."""

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


class ShownLink(_Shown):
    """A prefill node's link to a decode node: their places among the nodes; None: the gateway does not know it."""

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
    """A request that has ended; `slow`: why it was slow or failed."""

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


class Charts(_Shown):
    """Each list has one value for each window, the last one of now; None: nothing happened in it."""

    window_s: float = 0.0
    ttft_p50: tuple[float | None, ...] = ()
    ttft_p99: tuple[float | None, ...] = ()
    gap_p50: tuple[float | None, ...] = ()
    gap_p99: tuple[float | None, ...] = ()
    tokens_per_s: tuple[float | None, ...] = ()


class ClusterView(_Shown):
    """All of it; `now_s` is the gateway's unix time."""

    now_s: float = 0.0
    gateway: Name = ""
    model: Name = ""
    version: Name = ""
    draining: bool = False
    mixed: Sentence = ""
    totals: Totals = Totals()
    nodes: tuple[ShownNode, ...] = ()
    links: tuple[ShownLink, ...] = ()
    charts: Charts = Charts()
    requests: tuple[ShownRequest, ...] = ()


def read_view(text: str) -> ClusterView:
    """Reads the JSON of a gateway.

    Raises:
        InternalError: it has something else.
    """
    try:
        return ClusterView.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise InternalError(
            f"the gateway's view is not understood: {where}: {first['msg']}",
            cure="use the `baton` of the gateway's version",
        ) from None
