"""The door: takes requests, sends them through the hand-over between nodes, streams text back. No torch, no state on
disk; any number of gateways may serve the same nodes.

    service ─ serving ─ handover ─┬─ leg ─ session (decode nodes), prefill_call (prefill nodes)
                 │                └─ tokens, receipt
              reply ─ text, stop              cluster ─ node, pairs, discovery, router
"""
