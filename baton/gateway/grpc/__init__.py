"""The gateway's gRPC services, one file each: Baton's own, vLLM's engine, and Open Inference.

Each service translates its messages to `GenerateRequest` and from `GenerateResponse`, and calls
`baton.gateway.serving.serving`. None of them calls a node.
"""
