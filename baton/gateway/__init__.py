"""The gateway: receives requests, has nodes serve them, streams the text back. Any number of gateways share the nodes.

serving                                       requests from every door, and the state that they share
  preparation ── validate                     a message becomes a checked request
    tokenizer, text_pieces, chat, model
  fan_out, chat_output                        several outputs of one request; an output as a chat's answer
  request_driver ── connections               the asyncio shell: one driver per output, one connection per node
                     ├─ node_clients, decode_session, discovery/
  request_machine    └─ fleet, pairing        the decisions: pure, events in and commands out
    ├─ request_attempts, node_choice, router  which node decodes it
    ├─ request_hand_over                      which prefill nodes are called for it
    └─ request_output, reply, stop, receipt   what its client receives
"""
