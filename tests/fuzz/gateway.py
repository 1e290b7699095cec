"""Targets: all gRPC services and the HTTP API of a gateway between scripted nodes that answer every request at once."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from random import Random
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from baton.gateway.grpc.services import SERVICE_NAMES, add_services
from baton.gateway.http.call import Context
from baton.gateway.http.routes import ROUTES, create_app
from baton.gateway.http.view import View
from baton.gateway.request.connections import Connections
from baton.gateway.serving.serving import Serving
from baton.gateway.text.model import read_served_model
from baton.protos.internal.v1 import decode_pb2
from baton.protos.v1 import common_pb2
from baton.protos.v1 import generation_pb2 as pb
from baton.rpc.channels import connect
from baton.rpc.server import GrpcServer
from baton.settings.config import DEMO_MODELS
from baton.settings.gateway_config import GatewaySettings
from baton.settings.reader import read_settings
from tests.fuzz import mutate
from tests.fuzz.calls import Method, ask, method_of, methods_of
from tests.fuzz.framing import framing_targets
from tests.fuzz.target import AsyncTarget, Case
from tests.unit.gateway.http.test_hostile_bodies import MESSAGES, RESPONSES
from tests.unit.gateway.scripted_nodes import ScriptedNode, scripted_nodes

BOUND_S = 300  # wall time, so long that only what hangs takes it
_STANDARD = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
_GRAMMAR = common_pb2.Grammar(regex="a+")
_SAMPLING = common_pb2.SamplingParams(max_tokens=3, temperature=0.0, stop=["x"], grammar=_GRAMMAR)
_GREEDY = common_pb2.SamplingParams(temperature=0.0)
_MESSAGES = json.dumps([{"role": "user", "content": "Hi"}])
_TOOLS = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
_SAMPLES: tuple[Message, ...] = (
    pb.GenerateRequest(text="the fox", sampling=_SAMPLING),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=_GREEDY, output_token_ids=[8, 9]),
    pb.GenerateRequest(chat=pb.Chat(messages_json=_MESSAGES, tools_json=_TOOLS), sampling=_GREEDY, n=2),
    pb.TokenizeRequest(text="the fox"),
    pb.DetokenizeRequest(token_ids=[5, 6]),
    health_pb2.HealthCheckRequest(),
)
_RERANK = {"query": "the fox", "documents": ["the dog", {"text": "the end"}], "top_n": 1}
_BODIES: Mapping[str, tuple[Any, ...]] = {
    "/v1/completions": (
        {"prompt": "the fox", "max_tokens": 2, "stop": ["x"]},
        {"prompt": [5, 6], "n": 2, "logprobs": 1},
    ),
    "/v1/chat/completions": (
        {"messages": json.loads(_MESSAGES), "tools": json.loads(_TOOLS), "max_tokens": 2, "stream": True},
        {"messages": json.loads(_MESSAGES), "response_format": {"type": "json_object"}, "logprobs": True},
    ),
    "/v1/responses": (RESPONSES,),
    "/v1/responses/input_tokens": (RESPONSES,),
    "/v1/messages": (MESSAGES,),
    "/v1/messages/count_tokens": (MESSAGES,),
    "/v1/embeddings": ({"input": ["the fox", "the dog"], "encoding_format": "base64"}, {"input": [5, 6]}),
    "/v1/rerank": (_RERANK,),
    "/rerank": (_RERANK,),
    "/v1/score": ({"text_1": "the fox", "text_2": ["the dog", "the end"]},),
    "/tokenize": ({"prompt": "the fox"}, {"messages": json.loads(_MESSAGES)}),
    "/detokenize": ({"tokens": [5, 6]},),
}


async def _answer_all(node: ScriptedNode) -> None:
    """The decode node: one token more than the client has, for every request."""
    while True:
        request = await node.received.get()
        if not isinstance(request, decode_pb2.SessionRequest) or not request.HasField("submit"):
            continue
        key, index = request.submit.key, len(request.submit.output_token_ids)
        token = common_pb2.Token(token_id=300, index=index)
        if request.submit.sampling.HasField("logprobs"):
            token.logprob = -1.0
        step_token = decode_pb2.StepToken(key=key, token=token, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        for answer in (
            decode_pb2.SessionResponse(accepted=decode_pb2.Accepted(key=key, why="short")),
            decode_pb2.SessionResponse(step=decode_pb2.Step(tokens=[step_token])),
            decode_pb2.SessionResponse(released=decode_pb2.Released(key=key)),
        ):
            node.answers.put_nowait(answer)
        node.report.set()  # as all that the gateway has sent since the last report counts as still there


@asynccontextmanager
async def gateway_targets() -> AsyncIterator[Mapping[str, AsyncTarget]]:
    model = read_served_model(DEMO_MODELS / "llama", None)
    async with scripted_nodes(model.identity) as (_, decode):
        flags = ["--decode", decode.address, "--local-policy", "local", "--request-timeout-s", str(BOUND_S - 100)]
        settings = read_settings(GatewaySettings, "gateway", flags)
        async with Connections(settings, model) as connections, GrpcServer("127.0.0.1:0", advertise=None) as server:
            await asyncio.wait_for(connections.until_serves(), BOUND_S)
            serving = Serving(settings, model, connections)
            view = View(settings, serving, connections.fleet, "gateway")
            add_services(server, settings, serving, connections, view)
            await server.start(SERVICE_NAMES)
            app = create_app(Context(settings, serving, connections.fleet, view))
            answering = asyncio.create_task(_answer_all(decode))
            async with connect(server.address) as channel:
                known = methods_of(
                    (*SERVICE_NAMES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
                )

                def make_call(random: Random) -> Case:
                    method = random.choice(known)
                    requests = (_request(random, method) for _ in range(random.choice((0, 1, 1, 3))))
                    return method.path.encode(), *requests

                async def call(case: Case) -> str | None:
                    return await ask(channel, method_of(known, case[0]), case[1:])

                try:
                    yield {
                        "gateway_grpc": AsyncTarget(make_call, call),
                        "gateway_http": AsyncTarget(_make_http, partial(_http, app)),
                        **framing_targets(app),
                    }
                finally:
                    answering.cancel()
                    with suppress(asyncio.CancelledError):
                        await answering
                    model.close()


def _request(random: Random, method: Method) -> bytes:
    samples = [sample for sample in _SAMPLES if isinstance(sample, method.request)]
    if samples and random.random() < 0.7:
        made = mutate.changed_message(random, random.choice(samples))
    else:
        made = mutate.message(random, method.request)
    encoded = made.SerializeToString()
    return mutate.data(random, encoded) if random.random() < 0.15 else encoded


def _make_http(random: Random) -> Case:
    """Method, path, body, then names and values of headers."""
    route = random.choice([route for route in ROUTES if route.body is not None])
    value = mutate.json_value(random, random.choice(_BODIES[route.path]))
    body = json.dumps(value).encode()
    if random.random() < 0.2:
        body = mutate.data(random, body)
    headers: tuple[bytes, ...] = ()
    if random.random() < 0.1:
        name = random.choice((b"x-request-id", b"content-type", b"accept", b"authorization", b"timeout"))
        headers = name, mutate.data(random, b"value")
    path = route.path if random.random() < 0.95 else mutate.text(random, route.path)
    method = "POST" if random.random() < 0.95 else random.choice(("GET", "PUT", "HEAD", "OPTIONS"))
    return method.encode(), path.encode(), body, *headers


async def _http(app: Any, case: Case) -> str:
    """One request. Returns the answer's status.

    Raises:
        AssertionError: the answer is not an answer of ours.
    """
    method, path = (part.decode(errors="replace") for part in case[:2])
    body = case[2]
    headers = [(b"host", b"test"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    for name, content in zip(case[3::2], case[4::2], strict=False):
        headers.append((name.lower(), content.replace(b"\n", b"").replace(b"\r", b"")))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    given = [{"type": "http.request", "body": body, "more_body": False}]
    never = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        await never.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await asyncio.wait_for(app(scope, receive, send), BOUND_S)
    status = sent[0]["status"]
    answer = b"".join(message.get("body", b"") for message in sent[1:])
    assert status < 500, f"{method} {path} with {body[:500]!r}: {status} {answer[:500]!r}"
    assert b"INTERNAL" not in answer[:2000], answer[:500]
    if status >= 400 and method == "POST" and answer:
        error = json.loads(answer)["error"]
        return f"{status} {error.get('message')}"
    return str(status)
