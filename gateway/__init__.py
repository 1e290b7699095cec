"""The door: takes requests, has them served by the nodes, streams text back. Any number of gateways share the nodes.

service, serving                              requests from outside, and what all of them share
  request_driver ── connections               the asyncio shell: one driver per request, one connection per node
                     ├─ node_clients, decode_session, discovery
  request_machine    └─ fleet, pairing        the decisions: pure, events in and commands out
    ├─ attempt, node_choice, router           where the request is and where it goes next
    └─ token_order, reply, stop, receipt      what its client receives
"""
