"""Fields that agents and their libraries send to OpenAI's endpoints beyond OpenAI's and vLLM's own, and their meaning.

Some have an effect, some change no token and pass in silence, and some have no effect and are named in a warning.
Fields that would change the answer and cannot be served are declared as unsupported, so that the error names a cure.
Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.gateway.http.checking import Model, by_shape, tag, unsupported
from baton.gateway.http.unknown_fields import JsonBody

IGNORED = "accepted and ignored"
NO_EFFECT = "accepted without effect; a header `x-baton-warning` names it"

# Why each field has no effect, for warnings.
_REASONS: Mapping[str, str] = {
    "vllm_xargs": "there are no custom logits processors",
    "provider": "this server chooses nodes by itself",
    "models": "there is no other model to fall back to",
    "route": "there is no other model to fall back to",
    "transforms": "messages are never left out; a prompt that is too long is refused",
    "plugins": "no plugin runs here",
    "web_search_options": "the model answers without searching the web",
    "thinking_budget": "the model itself ends its reasoning",
    "thinking_token_budget": "the model itself ends its reasoning",
}


class UsageAccounting(Model):
    """OpenRouter's option about usage."""

    include: bool = False


class ThinkingSwitch(Model):
    """Whether the model reasons, as in the APIs of DeepSeek, Z.ai and Anthropic. The budget has no effect."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: str | None = None
    clear_thinking: bool | None = Field(None, description="variable of the template")


class ReasoningSwitch(Model):
    """Whether and how the model reasons, as in OpenRouter's API. The number of tokens has no effect."""

    enabled: bool | None = None
    effort: str | None = None
    exclude: bool = Field(False, description="leave the reasoning out of the answer")
    max_tokens: int | None = None
    summary: str | None = None


def _shape(value: object) -> str | None:
    if isinstance(value, bool):
        return "flag"
    return "object" if isinstance(value, dict | ThinkingSwitch) else None


FlagOrSwitch = Annotated[
    Annotated[bool, tag("flag")] | Annotated[ThinkingSwitch, tag("object")],
    by_shape(_shape, "true, false, or an object with a type"),
]


class ClientFields(Model):
    """Fields of clients, in chats and completions."""

    usage: UsageAccounting | None = Field(None, description="`include`: end a stream with the usage")
    prompt_cache_options: Any = Field(None, description=IGNORED)
    promptCacheKey: Any = Field(None, description="other name of `prompt_cache_key`")
    cache_control: Any = Field(None, description="`ttl`: as `prompt_cache_retention`")
    vllm_xargs: dict[str, Any] | None = Field(None, description=NO_EFFECT)
    provider: Any = Field(None, description=NO_EFFECT)
    models: Any = Field(None, description=NO_EFFECT)
    route: Any = Field(None, description=NO_EFFECT)
    transforms: Any = Field(None, description=NO_EFFECT)
    plugins: Any = Field(None, description=NO_EFFECT)


class ChatClientFields(ClientFields):
    """Fields of clients, in chats only."""

    enable_thinking: bool | None = Field(None, description="whether the model reasons, where the template can")
    thinking: FlagOrSwitch | None = Field(
        None, description="whether the model reasons: true, false, or an object whose `type` is enabled or disabled"
    )
    reasoning: ReasoningSwitch | None = Field(
        None, description="`enabled` and `effort`: whether and how the model reasons; `exclude`: do not send it"
    )
    chat_template_args: dict[str, Any] = Field({}, description="other name of `chat_template_kwargs`")
    thinking_budget: Any = Field(None, description=NO_EFFECT)
    thinking_token_budget: Any = Field(None, description=NO_EFFECT)
    web_search_options: Any = Field(None, description=NO_EFFECT)
    functions: Annotated[None, unsupported("give `tools`", [])] = None
    function_call: Annotated[None, unsupported("give `tool_choice`", "none", "auto")] = None
    audio: Annotated[None, unsupported("the model writes text only: leave it out")] = None

    @property
    def thinks(self) -> bool | None:
        """Whether the client turned reasoning on or off; None: it did not say."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if isinstance(self.thinking, bool):
            return self.thinking
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            return self.thinking.type == "enabled"
        return None if self.reasoning is None else self.reasoning.enabled

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the template that stand outside `chat_template_kwargs`."""
        switch = self.thinking
        if isinstance(switch, ThinkingSwitch) and switch.clear_thinking is not None:
            return {"clear_thinking": switch.clear_thinking, **self.chat_template_args}
        return self.chat_template_args


def without_effect(body: ClientFields) -> Iterator[str]:
    """Yields a sentence for each field of the body that has no effect here."""
    for name, reason in _REASONS.items():
        value = getattr(body, name, None)
        # Empty web_search_options ask for a search; other fields that are empty ask for nothing.
        if value not in (None, [], {}) or (value == {} and name == "web_search_options"):
            yield f"{name} has no effect: {reason}"
    if not isinstance(body, ChatClientFields):
        return
    budgets = {
        "thinking.budget_tokens": getattr(body.thinking, "budget_tokens", None),
        "reasoning.max_tokens": getattr(body.reasoning, "max_tokens", None),
    }
    for name, budget in budgets.items():
        if budget is not None:
            yield f"{name} has no effect: the model itself ends its reasoning"


def with_extra_body(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the body with the members of `extra_body` next to the others.

    `extra_body` is an argument of OpenAI's library, which sends its members; people who write the JSON themselves send
    it as it is.

    Raises:
        InvalidRequest: a member is also given outside.
    """
    extra = body.get("extra_body")
    if not isinstance(extra, dict):
        return body
    for name in extra:
        if body.get(name) is not None:
            raise InvalidRequest(f"extra_body has {name[:100]!r} again", field="extra_body", cure="give it once")
    members = {**body, **extra}
    members["extra_body"] = None
    return JsonBody(members, body.unknown if isinstance(body, JsonBody) else None)
