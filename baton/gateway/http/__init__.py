"""The HTTP door: OpenAI's and Anthropic's APIs in front of `baton.gateway.serving.serving`.

Models at the edge check every field; a stream's chunks are written from prebuilt templates. No other package imports
FastAPI.
"""
