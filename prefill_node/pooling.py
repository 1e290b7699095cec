"""Serves the Pool calls of a prefill node: hands their prompts to the engine, and their results to the gateway."""

import asyncio
import time
from collections import deque

from baton.core.errors import BatonError, Draining, InternalError, InvalidRequest
from baton.core.logs import enter_request
from baton.core.sampling import ResolvedSampling
from baton.core.token_ids import token_array
from baton.engine.events import StepEvents
from baton.engine.pooling import PoolSpan
from baton.engine.request import EngineRequest
from baton.node.assembly import Listener, Node
from baton.node.failures import log_arrival, log_failure
from baton.protos.internal.v1 import prefill_pb2 as pb
from baton.rpc.convert import adapter_from_proto
from prefill_node.pool_calls import AbortPooled, EndPoolCall, PoolCall, PoolCalls, PoolCommand, SubmitPooled

_SAMPLING = ResolvedSampling(max_tokens=1)


class PoolDriver:
    """Connects the Pool calls of one node to its engine. All methods belong to the event loop's thread."""

    def __init__(self, node: Node) -> None:
        self._name = node.name
        self._engine = node.engine
        self._numbers = node.numbers
        self._has_classifier = node.built.config.num_labels > 0
        limits = node.limits
        self._calls = PoolCalls(step_tokens=limits.max_batch_tokens, max_requests=limits.max_batch_requests)
        self._ended: dict[int, asyncio.Future[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._draining = False
        node.listen(Listener(on_step=self._on_step))

    @property
    def busy(self) -> bool:
        """Whether a call is live, or blocks of one are not free yet."""
        return self._calls.busy or bool(self._aborts)

    def knows(self, request_id: str) -> bool:
        """Whether this request of the engine belongs to a call."""
        return self._calls.knows(request_id)

    def stop_admission(self) -> None:
        self._draining = True

    def close(self) -> None:
        """Ends all calls; gateways then send them to other nodes."""
        self._draining = True
        error = Draining(f"{self._name} is shutting down", cure="the gateway sends the prompts to another node")
        self._execute(self._calls.end_all(error, time.monotonic()))

    async def pool(self, request: pb.PoolRequest) -> pb.PoolResponse:
        """Serves one call.

        Raises:
            BatonError: why it cannot be served.
        """
        if self._draining:
            raise Draining(f"{self._name} is draining", cure="send the prompts to another prefill node")
        number = next(self._numbers)
        enter_request(request.request_id)
        log_arrival(request.request_id, str(number))
        now_s = time.monotonic()
        call = PoolCall(number, [self._to_engine(request, prompt) for prompt in request.prompts], now_s)
        ended = self._ended[number] = asyncio.get_running_loop().create_future()
        try:
            self._execute(self._calls.begin(call, now_s))
            await ended
        except BatonError as error:
            log_failure(error, request.request_id, str(number))
            raise
        finally:
            del self._ended[number]
            self._execute(self._calls.cancel(number, time.monotonic()))  # does nothing to a call that has ended
        return _response(call)

    def _to_engine(self, request: pb.PoolRequest, prompt: pb.PoolPrompt) -> EngineRequest:
        if prompt.classify and not self._has_classifier:
            raise InvalidRequest("the model has no classification head", field="classify", value=True)
        span = PoolSpan(prompt.token_start, prompt.token_stop, tuple(prompt.logits_of), prompt.classify)
        return EngineRequest(
            request_id="",
            prompt=token_array(prompt.token_ids, field="prompt"),
            sampling=_SAMPLING,
            cache_salt=request.cache_salt,
            prefill_only=True,
            priority=request.priority,
            pool=span,
            adapter=adapter_from_proto(request.adapter),
        )

    def _on_step(self, events: StepEvents) -> None:
        self._execute(self._calls.step(events, time.monotonic()))

    def _execute(self, given: list[PoolCommand]) -> None:
        commands = deque(given)
        while commands:
            match commands.popleft():
                case SubmitPooled(request=request):
                    try:
                        self._engine.submit(request)
                    except Exception as error:  # noqa: BLE001  the gateway gets it
                        now_s = time.monotonic()
                        commands.extend(self._calls.refused(request.request_id, _to_baton_error(error), now_s))
                case AbortPooled(request_id=request_id):
                    task = asyncio.create_task(self._engine.abort(request_id), name=f"abort-{request_id}")
                    self._aborts.add(task)
                    task.add_done_callback(self._aborts.discard)
                case EndPoolCall(call=call, error=error):
                    ended = self._ended.get(call)
                    if ended is None or ended.done():
                        continue
                    if error is None:
                        ended.set_result(None)
                    else:
                        ended.set_exception(error)


def _response(call: PoolCall) -> pb.PoolResponse:
    results = [call.results[index] for index in range(len(call.requests))]
    return pb.PoolResponse(
        pooled=[
            pb.PooledPrompt(values=each.values.astype("<f4").tobytes(), cached_tokens=each.cached_tokens)
            for each in results
        ],
        queue_s=call.queue_s,
        pool_s=call.pool_s,
    )


def _to_baton_error(error: Exception) -> BatonError:
    if isinstance(error, BatonError):
        return error
    return InternalError(f"the prefill node failed: {type(error).__name__}: {error}", cure="see the node's log")
