"""`baton chat`: a conversation in the terminal. The gateway applies the checkpoint's chat template."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.chat_terminal import PipedTurns, TurnReader, TypedTurns, stdout_console, written
from baton.cli.receipt import tokens_per_s
from baton.cli.sampling_flags import takes_sampling_flags
from baton.cli.sizes import mib, milliseconds
from baton.client.client import DEFAULT_TARGET, AsyncClient
from baton.client.outputs import Event, Finished, Notice
from baton.core.errors import BatonError
from baton.core.log_lines import escaped
from baton.core.logs import write_line
from baton.core.sampling import SamplingParams
from baton.core.sampling_field import Door

HELP = """\
/clear          forget the conversation
/system TEXT    set the system message and forget the conversation
/system         show the system message
/help           show this
/quit           leave, like Ctrl-D

Ctrl-C stops an answer. A paste of several lines is one turn,
and so are several lines between \"\"\" and \"\"\"."""
_LEAVE = ("/quit", "/exit")
_COMMAND = re.compile(r"/[a-z]+")
_FIRST = "/help shows the commands; /quit or Ctrl-D leaves"

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
        self.system = system
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

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
    turns: TurnReader = TypedTurns() if interactive else PipedTurns()
    failed = False
    name = ""
    # Input is read outside the event loop: there Ctrl-C ends the read, whereas inside the loop it cancels the answer.
    with asyncio.Runner() as runner, _connected(runner, questions.target) as client:
        if interactive:
            cards = runner.run(client.list_models())
            names = [escaped(card.name) for card in cards]
            name = questions.model or next(iter(names), "")
            notes.print(f"{', '.join(names)} at {client.target}; {_FIRST}", style="dim", markup=False)
            if cards and cards[0].description:
                notes.print(escaped(cards[0].description), style="dim", markup=False)
        while (line := turns.read()) is not None:
            if not line.strip():
                continue
            if line.strip() in _LEAVE:
                break
            if (said := _said(line, conversation, interactive=interactive)) is not None:
                notes.print(said, style="dim", markup=False, soft_wrap=True)
                continue
            conversation.ask(line)
            answer = ChatReply(notes, name)
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


def _said(line: str, conversation: Conversation, *, interactive: bool) -> str | None:
    """Carries out a command, and returns what it answers. Returns None if the line is a question.

    A person's mistyped command gets the list of commands. Piped lines such as paths are questions.
    """
    command, _, argument = line.strip().partition(" ")
    match command:
        case "/clear" | "/reset" if not argument:
            conversation.clear()
            return "conversation cleared"
        case "/system" if argument:
            conversation.system = argument.strip()
            conversation.clear()
            return "system message set, conversation cleared"
        case "/system":
            return conversation.system or "no system message; /system TEXT sets one"
        case "/help" if not argument:
            return HELP
    mistyped = interactive and not argument and _COMMAND.fullmatch(command)
    return f"{command} is not a command\n{HELP}" if mistyped else None


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


@dataclass(frozen=True)
class Questions:
    """The parts of a request that all turns share."""

    target: str
    model: str
    sampling: SamplingParams
    template_kwargs: Mapping[str, object]


class ChatReply:
    """Shows one answer as it arrives: its text on stdout; reasoning, tool calls and remarks on stderr, dimmed.

    Args:
        name: shown above the answer, and asks for a line with its speed below it; "": neither.
    """

    def __init__(self, notes: Console, name: str = "") -> None:
        self._notes = notes
        self._name = name
        self._named = False
        self._noted = False  # stderr has an open line
        self._written = written(stdout_console())
        self._finished: Finished | None = None
        self.text = ""

    def show(self, event: Event) -> None:
        if isinstance(event, Notice):
            self._note(f"\n({event.message})\n")
            return
        if isinstance(event, Finished):
            self._finished = event
        if event.chat is not None:
            calls = [f"\n{call.name} " * bool(call.name) + call.arguments for call in event.chat.tool_calls]
            self._note(event.chat.reasoning + "".join(calls))
            self._say(event.chat.content)

    def end(self, *, note: str = "") -> None:
        self._close_note()
        self._written.end()
        if self._name and self._finished is not None:
            note = speed_line(self._finished)
        if note:
            self._notes.print(f"({note})", style="dim", markup=False)

    def _say(self, content: str) -> None:
        if content:
            self._close_note()
            self._show_name()
            self.text += content
            self._written.add(content)

    def _note(self, aside: str) -> None:
        if aside:
            self._show_name()
            self._notes.print(aside, style="dim", end="", markup=False, soft_wrap=True)
            self._noted = not aside.endswith("\n")

    def _close_note(self) -> None:
        if self._noted:
            self._notes.print()
            self._noted = False

    def _show_name(self) -> None:
        if self._name and not self._named:
            self._notes.print(f"{self._name}>", style="bold", markup=False)
            self._named = True


def speed_line(finished: Finished) -> str:
    """Speed of an answer, and where it was computed, in one line."""
    usage, receipt = finished.usage, finished.receipt
    parts = [f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out"]
    parts.append(f"first after {milliseconds(receipt.ttft_s)}")
    if speed := tokens_per_s(usage, receipt):
        parts.append(f"then {speed:.0f} tokens/s")
    if receipt.bytes_sent:
        moved = f"{mib(receipt.bytes_sent)} over {receipt.transport}"
        parts.append(f"{receipt.prefill_node} handed {moved} to {receipt.decode_node}")
    else:
        parts.append(f"all on {receipt.decode_node}")
    return "; ".join(parts)


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
