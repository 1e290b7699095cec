"""A chat by the OpenAI client. OPENAI_BASE_URL names the gateway; the default is http://127.0.0.1:8000/v1."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What does zip do?"}],
    max_tokens=40,
    stream=True,
    extra_headers={"x-baton-receipt": "1"},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    if receipt := (chunk.model_extra or {}).get("baton", {}).get("receipt"):
        print(f"\n\npath {receipt['path']}: {receipt['why']}")
