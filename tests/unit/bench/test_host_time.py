"""The decode node whose host time is measured serves requests as a real one does."""

from bench.host_time import DecodeHost


def test_requests_are_handed_over_decoded_and_released() -> None:
    node = DecodeHost(4)
    for output_tokens in (3, 20, 40):
        node.hand_over(output_tokens)
    steps = 0
    while node.live > 1:
        node.step()
        steps += 1
    assert steps >= 19
    node.hand_over(5)
    while node.live > 1:
        node.step()
    assert node.bytes_sent > (3 + 20 + 5) * 5
    assert all(seconds > 0.0 for seconds in node.cpu_s.values())
