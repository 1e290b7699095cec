"""Makes nodes and links of `/ui/state` for 20 prefill and 30 decode nodes with GPUs from those of a small cluster.

The figures are made up; only their form is that of a gateway.
"""

import random
from typing import Any

PREFILLS, DECODES = 20, 30
POINTS = 75


def fifty_nodes(state: dict[str, Any]) -> dict[str, Any]:
    """The nodes and links of a large cluster, each like one in this state."""
    draws = random.Random(1)
    nodes = [
        _node(next(each for each in state["nodes"] if each["role"] == role), f"{role}-{number}", number, draws)
        for role, count in (("prefill", PREFILLS), ("decode", DECODES))
        for number in range(count)
    ]
    nodes[3]["state"] = "draining"
    nodes[7]["name"] = "prefill-of-a-deployment-with-a-long-name-7f9c8d-x2x4z"
    nodes[PREFILLS + 5] |= {"state": "unreachable", "detail": "connection refused"}
    links = [
        state["links"][0]
        | {
            "prefill": prefill,
            "decode": PREFILLS + decode,
            "peer": f"decode-{decode}",
            "bytes_total": draws.randint(0, 10**10),
        }
        for prefill in range(PREFILLS)
        for decode in range(DECODES)
    ]
    links[17] |= {"state": "refused", "detail": "cache dtype: float16 and bfloat16; use the same --dtype for both"}
    return {"nodes": nodes, "links": links}


def _node(like: dict[str, Any], name: str, number: int, draws: random.Random) -> dict[str, Any]:
    running, tokens = draws.randint(0, like["seats"]), draws.randint(100, 9000)
    return like | {
        "name": name,
        "address": f"10.0.{like['role'] == 'decode':d}.{number}:7001",
        "blocks_free": draws.randint(0, like["blocks"]),
        "blocks_leased": draws.randint(0, 100),
        "running": running,
        "rows": running,
        "waiting": draws.randint(0, 9),
        "tokens_per_s": tokens,
        "history": {
            "running": [draws.randint(0, like["seats"]) for _ in range(POINTS)],
            "tokens_per_s": [None, *(draws.randint(0, 9000) for _ in range(POINTS - 1))],
            "kv_percent": [draws.randint(0, 100) for _ in range(POINTS)],
        },
        "gpus": [
            {
                "name": "NVIDIA H100 80GB HBM3",
                "memory_used_bytes": draws.randint(10, 79) * 10**9,
                "memory_total_bytes": 85 * 10**9,
                "busy_share": round(draws.random(), 2),
                "power_w": float(draws.randint(100, 700)),
                "power_limit_w": 700.0,
            }
        ],
    }
