"""Steps reuse the parts of earlier messages, and no message shows it."""

from dataclasses import replace

import pytest

from baton.core.types import FinishReason
from baton.protos.internal.v1 import decode_pb2 as pb
from baton.protos.v1 import common_pb2
from decode_node.events import Reserved, SessionClosed, SessionOpened
from tests.unit.decode_node.scene import Scene, reservation, sent, token

KEYS = range(1, 201)


@pytest.fixture
def scene() -> Scene:
    return Scene(waiting_max=len(KEYS))


def plain(key: int, index: int) -> pb.StepToken:
    return pb.StepToken(key=key, token=common_pb2.Token(token_id=100 + index, index=index))


def test_a_message_keeps_its_tokens_when_later_steps_are_made(scene: Scene) -> None:
    scene.decoding(1)
    scene.decoding(2)
    (first,) = sent(scene.step(token(1, 1), token(2, 1)))
    scene.step(token(2, 2), token(1, 2))
    assert list(first.step.tokens) == [plain(1, 1), plain(2, 1)]


def test_a_step_with_fewer_tokens_has_none_of_the_step_before(scene: Scene) -> None:
    for key in KEYS:
        scene.decoding(key)
    scene.step(*(token(key, 1) for key in KEYS))
    for key in (2, 1):
        (message,) = sent(scene.step(token(key, 2)))
        assert list(message.step.tokens) == [plain(key, 2)]


def test_what_one_token_says_besides_its_number_is_not_repeated(scene: Scene) -> None:
    for key in (1, 2, 3):
        scene.decoding(key)
    scored = replace(token(2, 1).token, logprob=-0.5, top_logprobs=((7, -0.25),))
    last = token(3, 1)._replace(finish_reason=FinishReason.STOP, stop_reason="101")
    (message,) = sent(scene.step(token(1, 1), token(2, 1)._replace(token=scored), last))[:1]
    assert [each.key for each in message.step.tokens] == [1, 2, 3]
    _, with_logprobs, ended = message.step.tokens
    assert (with_logprobs.token.logprob, ended.stop_reason) == (-0.5, "101")
    (message,) = sent(scene.step(token(1, 2), token(2, 2)))
    assert list(message.step.tokens) == [plain(1, 2), plain(2, 2)]


def test_each_gateway_gets_its_own_tokens(scene: Scene) -> None:
    scene.decoding(1)
    scene.on(SessionOpened(2))
    scene.submit(5, session=2, policy=pb.LOCAL_POLICY_LOCAL)
    scene.on(Reserved("2.5", reservation(5, session=2)))
    scene.step(token(1, 1), token(5, 1, session=2))
    own, others = sent(scene.step(token(5, 2, session=2), token(1, 2)))
    assert [list(own.step.tokens), list(others.step.tokens)] == [[plain(5, 2)], [plain(1, 2)]]
    scene.on(SessionClosed(2))
    (message,) = sent(scene.step(token(1, 3)))
    assert list(message.step.tokens) == [plain(1, 3)]
