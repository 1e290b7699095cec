"""`baton chat`: a conversation in the terminal. The gateway applies the checkpoint's chat template."""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.sampling_flags import takes_sampling_flags
from baton.client.client import DEFAULT_TARGET, AsyncClient
from baton.client.outputs import Event, Notice
from baton.core.errors import BatonError
from baton.core.logs import write_line
from baton.core.sampling import SamplingParams
from baton.core.sampling_field import Door

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"

Message = dict[str, object]


@takes_sampling_flags(Door.CHAT_COMMAND)
def chat(
    sampling: SamplingParams,
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    system: Annotated[str | None, typer.Option(help="System message at the start of the conversation.")] = None,
    model: Annotated[str, typer.Option(help="Served model, or one of its adapters. Default: the served model.")] = "",
    template_kwargs: Annotated[
        str, typer.Option(help='Variables of the chat template as JSON, such as {"enable_thinking": false}.')
    ] = "{}",
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Talk to the model. If input is piped, each line is one turn."""
    use(api_key, client_ca)
    questions = Questions(target, model, sampling, _read_object(template_kwargs))
    failed = _converse(Conversation(system), questions)
    raise typer.Exit(1 if failed else 0)


class Conversation:
    """The messages so far, in OpenAI's shape."""

    def __init__(self, system: str | None = None) -> None:
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = [*self._system]

    def reset(self) -> None:
        self.messages = [*self._system]

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Forgets a question that got no answer, since templates want the roles to alternate."""
        self.messages.pop()


def _converse(conversation: Conversation, questions: "Questions") -> bool:
    """Answers turns until the end of input. Returns whether an answer failed while input was piped."""
    notes = Console(stderr=True, highlight=False)
    interactive = sys.stdin.isatty()
    failed = False
    # Input is read outside the event loop: there Ctrl-C ends the read, whereas inside the loop it cancels the answer.
    with asyncio.Runner() as runner, _connected(runner, questions.target) as client:
        if interactive:
            cards = runner.run(client.list_models())
            notes.print(f"{', '.join(card.name for card in cards)} at {client.target}; {_HELP}", style="dim")
        while (line := _read_turn(interactive=interactive)) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    break
                case "/reset":
                    conversation.reset()
                    notes.print("conversation reset", style="dim")
                    continue
                case "/help":
                    notes.print(_HELP, style="dim")
                    continue
            conversation.ask(line)
            answer = ChatReply(notes)
            try:
                runner.run(_show(client, conversation, questions, answer))
            except KeyboardInterrupt:
                answer.end(note="stopped")
            except BatonError as error:
                answer.end()
                write_line(f"baton: {error}")
                failed = not interactive
            else:
                answer.end()
            if answer.text:
                conversation.answer(answer.text)
            else:
                conversation.take_back()
    return failed


@contextmanager
def _connected(runner: asyncio.Runner, target: str) -> Iterator[AsyncClient]:
    async def connect() -> AsyncClient:
        return AsyncClient(target)

    client = runner.run(connect())
    try:
        yield client
    finally:
        runner.run(client.close())


async def _show(client: AsyncClient, conversation: Conversation, questions: "Questions", answer: "ChatReply") -> None:
    events = client.stream_chat(
        conversation.messages, questions.sampling, template_kwargs=questions.template_kwargs, model=questions.model
    )
    async with aclosing(events):
        async for event in events:
            answer.show(event)


def _read_turn(*, interactive: bool) -> str | None:
    """Reads one line of input, without its newline. Returns None at the end of input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


@dataclass(frozen=True)
class Questions:
    """The parts of a request that all turns share."""

    target: str
    model: str
    sampling: SamplingParams
    template_kwargs: Mapping[str, object]


class ChatReply:
    """Prints one answer as it arrives: its text to stdout, and reasoning, tool calls and notices to stderr, dimmed."""

    def __init__(self, notes: Console) -> None:
        self._notes = notes
        self._noted = False  # stderr has an open line
        self.text = ""

    def show(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._note(f"\n({event.message})\n")
        elif event.chat is not None:
            calls = [f"\n{call.name} " * bool(call.name) + call.arguments for call in event.chat.tool_calls]
            self._note(event.chat.reasoning + "".join(calls))
            self._say(event.chat.content)

    def end(self, *, note: str = "") -> None:
        self._close_note()
        if self.text:
            print(flush=True)
        if note:
            self._notes.print(f"({note})", style="dim")

    def _say(self, content: str) -> None:
        if content:
            self._close_note()
            self.text += content
            print(content, end="", flush=True)

    def _note(self, aside: str) -> None:
        if aside:
            self._notes.print(aside, style="dim", end="", markup=False, soft_wrap=True)
            self._noted = not aside.endswith("\n")

    def _close_note(self) -> None:
        if self._noted:
            self._notes.print()
            self._noted = False


def _read_object(text: str) -> dict[str, object]:
    """Parses the value of --template-kwargs.

    Raises:
        BadParameter: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not JSON: {error}", param_hint="--template-kwargs") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--template-kwargs")
    return value
