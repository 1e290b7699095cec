"""OpenAI's Responses API, without state: `models` checks requests, `translate` converts them to ours, `answer` and
`stream` write answers, and `routes` has the endpoint.
"""
