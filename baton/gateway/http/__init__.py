"""The HTTP server: OpenAI's and Anthropic's APIs in front of `baton.gateway.serving.serving`.

Pydantic models check every field of a body, and streams are written from prebuilt templates. No other package imports
FastAPI.
"""
