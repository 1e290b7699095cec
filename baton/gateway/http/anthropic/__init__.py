"""Anthropic's Messages API: `models` checks a request, `translate` turns it into ours, `answer` and `stream` write what
the model says, `errors` has the shape of errors, `routes` the endpoints.
"""
