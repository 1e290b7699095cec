"""An agent's loop: the model calls a tool, this program runs it, and the model goes on with the result.

The first turn must call the tool. A grammar then holds the model to the tool's schema, so even a tiny model calls it
correctly. OPENAI_BASE_URL names the gateway, by default http://127.0.0.1:8000/v1 of this machine.
"""

import json
import os
from typing import Literal

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a function of Python.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"enum": ["zip", "map", "sorted"]}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}


def look_up(name: str) -> str:
    return str(getattr(__builtins__, name).__doc__).splitlines()[0]


messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does zip do?"}]
for choice in ("required", "none"):
    mode: Literal["required", "none"] = "required" if choice == "required" else "none"
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice=mode,
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    ).choices[0]
    messages.append(answer.message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    for call in answer.message.tool_calls or ():
        if call.type == "function":
            print("calls", call.function.name, call.function.arguments)
            result = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print(answer.message.content)
