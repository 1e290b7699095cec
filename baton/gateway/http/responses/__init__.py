"""OpenAI's Responses API, stateless: `models` checks a request, `translate` turns it into ours, `answer` and `stream`
write what the model says, `routes` is the endpoint.
"""
