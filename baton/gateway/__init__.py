"""The gateway: receives requests, has nodes serve them, streams the text back. Any number of gateways share the nodes.

process                     worker processes, and the counters that they share
http  grpc  picker          doors: they translate requests and answers, and decide nothing
serving                     what every request passes: preparation, validation, admission
observe                     metrics, records, traces
request                     one request: its machine, driver, connections and receipt
fleet                       nodes as the gateway knows them, the router, placement, discovery
text                        tokenizer, detokenizer, chat templates, tool calls
core                        types and helpers of all rooms

A room imports only rooms below it; `tests/test_architecture.py` holds that.
"""
