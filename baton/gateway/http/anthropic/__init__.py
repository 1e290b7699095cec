"""Anthropic's Messages API: `models` checks requests, `translate` converts them to ours, `answer` writes answers and
streams, `errors` formats errors, and `routes` has the endpoints.
"""
