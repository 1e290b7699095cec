"""The gateway's gRPC services in front of `baton.gateway.serving.serving`, one file each: Baton's own, vLLM's engine,
Open Inference.

Each translates its messages to `GenerateRequest` and from `GenerateResponse`; none reaches a node.
"""
