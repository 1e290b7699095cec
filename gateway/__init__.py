"""The gateway: receives requests, has nodes serve them, streams the text back. Any number of gateways share the nodes.

service, serving                              client requests, and the state that they share
  request_driver ── connections               the asyncio shell: one driver per request, one connection per node
                     ├─ node_clients, decode_session, discovery
  request_machine    └─ fleet, pairing        the decisions: pure, events in and commands out
    ├─ attempt, node_choice, router           where the request is and where it goes next
    └─ token_order, reply, stop, receipt      what its client receives
"""
