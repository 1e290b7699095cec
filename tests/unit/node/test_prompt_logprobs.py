"""Prompt logprobs are unchanged by their way through a message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.sampling import MAX_LOGPROBS
from baton.core.types import PromptLogprob
from baton.node.prompt_logprobs import add_prompt_logprobs
from baton.protos.internal.v1 import decode_pb2, prefill_pb2
from baton.protos.v1 import common_pb2
from baton.rpc.convert import prompt_logprobs_from_proto

token_ids = st.integers(0, 2**32 - 1)
values = st.floats(allow_nan=False)
scored = st.builds(
    PromptLogprob,
    token_ids,
    st.none() | values,
    st.lists(st.tuples(token_ids, values), max_size=MAX_LOGPROBS).map(tuple),
)


@given(st.lists(scored, max_size=5), st.sampled_from([prefill_pb2.PrefillFirstToken, decode_pb2.StepToken]))
def test_every_value_arrives(
    logprobs: list[PromptLogprob], kind: type[prefill_pb2.PrefillFirstToken | decode_pb2.StepToken]
) -> None:
    message = kind(token=common_pb2.Token(token_id=9, index=3), stop_reason="x")
    add_prompt_logprobs(message, logprobs)
    arrived = kind.FromString(message.SerializeToString())
    assert list(prompt_logprobs_from_proto(arrived.prompt_logprobs)) == logprobs
    assert (arrived.token.token_id, arrived.token.index, arrived.stop_reason) == (9, 3, "x")


@pytest.mark.parametrize("count", [0, 1, MAX_LOGPROBS])
def test_the_message_is_the_one_that_protobuf_itself_makes(count: int) -> None:
    top = tuple((token_id, -0.25) for token_id in range(count))
    logprobs = [PromptLogprob(300, None), *(PromptLogprob(token_id, -0.5, top) for token_id in (0, 127, 128, 131_071))]
    message = decode_pb2.StepToken()
    add_prompt_logprobs(message, logprobs)
    assert message == decode_pb2.StepToken(
        prompt_logprobs=[
            common_pb2.PromptLogprob(
                token_id=each.token_id,
                logprob=each.logprob,
                top_logprobs=[
                    common_pb2.TokenLogprob(token_id=token, logprob=value) for token, value in each.top_logprobs
                ],
            )
            for each in logprobs
        ]
    )
