"""A cluster whose processes listen and are found over IPv6 alone."""

import json
import urllib.request

import pytest

from tests.integration.cluster import Flags, Machines
from tests.ipv6 import has_ipv6_loopback

ADDRESS = "[::1]:"


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no IPv6")
def test_a_cluster_serves_over_ipv6_alone(start: Machines) -> None:
    flags: Flags = {"listen": "[::1]:0", "health_listen": "[::1]:0", "metrics_listen": "[::1]:0"}
    prefill, decode = start.nodes(("prefill", flags), ("decode", flags))
    gateway = start.gateway(
        [prefill],
        [decode],
        local_policy="strict",
        listen="[::1]:0",
        health_listen="[::1]:0",
        metrics_listen="[::1]:0",
        http_listen="[::1]:0",
    )
    assert all(each.address.startswith(ADDRESS) for each in (prefill, decode, gateway))
    body = {"model": "llama", "prompt": "The conductor of the orchestra " * 24, "max_tokens": 4, "ignore_eos": True}
    request = urllib.request.Request(
        f"{gateway.http}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-baton-receipt": "1"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    assert found["usage"]["completion_tokens"] == 4
    # The prefill node computed it, and found the decode node by its address.
    receipt = found["baton"]["receipt"]
    assert (receipt["path"], receipt["prompt_tokens_sent"]) == ("remote", found["usage"]["prompt_tokens"])
