"""`baton generate`: sends prompts to a gateway, and prints text as it arrives or JSON at the end."""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Unpack

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.cli.access import ApiKey, ClientCa, use
from baton.cli.prompts import Prompt, PromptRecord, parse_token_ids, read_records
from baton.cli.receipt import receipt_lines
from baton.cli.sampling_flags import takes_sampling_flags
from baton.client.client import DEFAULT_TARGET, AsyncClient
from baton.client.messages import Options, Sampling
from baton.client.outputs import Completion, Finished, Notice
from baton.core.errors import BatonError, InternalError
from baton.core.limits import DURATION_S_MIN, SECONDS_MAX
from baton.core.log_lines import escaped
from baton.core.logs import write_line
from baton.core.sampling import SamplingParams
from baton.core.sampling_field import Door
from baton.core.types import FinishReason, TokenOutput

_FILE_REQUESTS_MAX = 256  # prompts of one file that run at once
_FILE_RETRY_S = 600.0  # how long a prompt of a file waits for room in a full cluster
_CALLS_MAX = 32  # at once
_TEXT_MAX = 24  # characters of a token
_HEADER = ("logprob", "token", "instead of it")


@takes_sampling_flags(Door.GENERATE_COMMAND)
def generate(
    sampling: SamplingParams,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.", show_default=False)] = None,
    target: Annotated[str, typer.Option(help="host:port of a gateway.", envvar="BATON_TARGET")] = DEFAULT_TARGET,
    token_ids: Annotated[str | None, typer.Option(help="Comma-separated token ids instead of PROMPT.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts instead of PROMPT: one text per line, or JSON lines, each a string or "
            '{"prompt": text or token ids, "id": ...}. Prompts run in parallel.',
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; with --file, one per line, in order.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(min=DURATION_S_MIN, max=SECONDS_MAX, help="Deadline of each request in seconds. Default: none."),
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            min=DURATION_S_MIN,
            max=1e3 * SECONDS_MAX,
            help="Target time to the first token in milliseconds. Default: the gateway's.",
        ),
    ] = None,
    tpot_ms: Annotated[
        float | None,
        typer.Option(
            min=DURATION_S_MIN,
            max=1e3 * SECONDS_MAX,
            help="Target mean time per further token in milliseconds. Default: the gateway's.",
        ),
    ] = None,
    api_key: ApiKey = None,
    client_ca: ClientCa = None,
) -> None:
    """Send prompts to a gateway and print the output."""
    use(api_key, client_ca)
    if sum(way is not None for way in (prompt, token_ids, file)) != 1:
        raise typer.BadParameter("give exactly one of PROMPT, --token-ids and --file", param_hint="PROMPT")
    options: Options = {"timeout_s": timeout, "ttft_s": _seconds(ttft_ms), "tpot_s": _seconds(tpot_ms)}
    if file is not None:
        failed = asyncio.run(_all(target, read_records(file), sampling, options, as_json=as_json))
        raise typer.Exit(1 if failed else 0)
    if as_json:
        asyncio.run(_print_json(target, _one_prompt(prompt, token_ids), sampling, options))
    else:
        _print_receipt(asyncio.run(print_answer(target, _one_prompt(prompt, token_ids), sampling, **options)))


async def print_answer(target: str, prompt: Prompt, sampling: Sampling, **options: Unpack[Options]) -> Finished:
    """Prints text as it arrives, then the tokens' logprobs if they were requested. Returns the last event."""
    finished: Finished | None = None
    tokens: list[TokenOutput] = []
    shown, text = False, ""
    async with AsyncClient(target) as client:
        try:
            async for event in client.generate(prompt, sampling, **options):
                if isinstance(event, Notice):
                    write_line(f"baton: {event.message}")
                    continue
                print(event.text, end="", flush=True)
                text += event.text
                tokens += event.tokens
                shown = True
                if isinstance(event, Finished):
                    finished = event
        finally:
            if shown:
                print(flush=True)  # an error after the text starts on a new line
        if finished is None:
            raise InternalError("the stream ended without its last message", cure="see the gateway's log")
        if not text and finished.finish_reason is FinishReason.STOP and not finished.stop_reason:
            write_line("baton: the model ended at once, without text; ask it a question with `baton chat`")
        await _print_logprobs(client, tokens)
    return finished


async def _print_logprobs(client: AsyncClient, tokens: Sequence[TokenOutput]) -> None:
    if any(token.logprob is not None for token in tokens):
        print(f"\n{logprob_table(tokens, await token_texts(client, tokens))}", flush=True)


def _print_receipt(finished: Finished) -> None:
    """Prints the receipt to stderr, dimmed, if that is a terminal."""
    if sys.stderr.isatty():
        lines = [f"  {name:<10} {text}" for name, text in receipt_lines(finished.usage, finished.receipt)]
        Console(stderr=True, highlight=False).print("\n".join(["", *lines]), style="dim", markup=False, soft_wrap=True)


def to_json(completion: Completion) -> dict[str, object]:
    """The object that `--json` prints."""
    has_logprobs = any(token.logprob is not None for token in completion.tokens)
    return {
        "request_id": completion.request_id,
        "text": completion.text,
        "token_ids": [token.token_id for token in completion.tokens],
        "logprobs": [_logprob(token) for token in completion.tokens] if has_logprobs else None,
        "finish_reason": completion.finish_reason.value,
        "usage": asdict(completion.usage),
        "receipt": asdict(completion.receipt),
    }


def _logprob(token: TokenOutput) -> dict[str, object]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top_logprobs]
    return {"token_id": token.token_id, "logprob": token.logprob, "top": top}


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


async def _print_json(target: str, prompt: Prompt, sampling: Sampling, options: Options) -> None:
    async with AsyncClient(target) as client:
        print(json.dumps(to_json(await client.complete(prompt, sampling, **options))))


async def _all(
    target: str, records: Sequence[PromptRecord], sampling: Sampling, options: Options, *, as_json: bool
) -> bool:
    """Runs the prompts in parallel, and prints their results in the file's order. Returns whether a prompt failed."""
    failed = False
    with _progress() as progress:
        bar = progress.add_task("prompts", total=len(records))
        async with AsyncClient(target, retry_s=_FILE_RETRY_S) as client:
            free = asyncio.Semaphore(_FILE_REQUESTS_MAX)

            async def one(prompt: Prompt) -> Completion | BatonError:
                async with free:
                    try:
                        return await client.complete(prompt, sampling, **options)
                    except BatonError as error:
                        return error
                    finally:
                        progress.advance(bar)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(record.prompt)) for record in records]
                for record, task in zip(records, tasks, strict=True):
                    result = await task
                    failed = failed or isinstance(result, BatonError)
                    _print_result(progress.console, record, result, as_json=as_json)
                    if isinstance(result, Completion) and not as_json:
                        await _print_logprobs(client, result.tokens)
    return failed


def _print_result(notes: Console, record: PromptRecord, result: Completion | BatonError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_record_to_json(record, result)), flush=True)
    else:
        print(f"==> {record.index + 1} <==", flush=True)
        if isinstance(result, Completion):
            print(result.text, flush=True)
    if isinstance(result, BatonError):
        # The progress bar may share the terminal, so the line goes through its console.
        notes.print(f"baton: prompt {record.index + 1}: {escaped(str(result))}", markup=False, soft_wrap=True)


def _record_to_json(record: PromptRecord, result: Completion | BatonError) -> dict[str, object]:
    given: dict[str, object] = {"index": record.index, "prompt": record.prompt}
    if record.id is not None:
        given["id"] = record.id
    if isinstance(result, Completion):
        return {**given, **to_json(result)}
    return {**given, "error": {"reason": result.reason, "message": str(result), "request_id": result.request_id}}


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # NOTE: by default rich redirects stdout to the bar's stderr, even if stdout is a file.
    return Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    )


def _one_prompt(prompt: str | None, token_ids: str | None) -> Prompt:
    return prompt or "" if token_ids is None else parse_token_ids(token_ids)


async def token_texts(client: AsyncClient, tokens: Sequence[TokenOutput]) -> dict[int, str]:
    """Returns the text of each token and of its alternatives, by token id. Part of a character is U+FFFD."""
    found = sorted({token_id for token in tokens for token_id in (token.token_id, *dict(token.top_logprobs))})
    free = asyncio.Semaphore(_CALLS_MAX)

    async def text(token_id: int) -> str:
        async with free:
            return await client.detokenize([token_id], skip_special_tokens=False)

    return dict(zip(found, await asyncio.gather(*map(text, found)), strict=True))


def logprob_table(tokens: Sequence[TokenOutput], texts: Mapping[int, str]) -> str:
    """One line per token: its logprob, its text in quotes, and the other most probable tokens, best first."""
    rows = []
    for token in tokens:
        others = [
            f"{_quoted(texts[token_id])} {logprob:.2f}"
            for token_id, logprob in token.top_logprobs
            if token_id != token.token_id
        ]
        logprob = "" if token.logprob is None else f"{token.logprob:.2f}"
        rows.append((logprob, _quoted(texts[token.token_id]), "  ".join(others)))
    widths = [max(len(row[column]) for row in (_HEADER, *rows)) for column in range(2)]
    return "\n".join(
        f"{logprob:>{widths[0]}}  {text:<{widths[1]}}  {others}".rstrip() for logprob, text, others in (_HEADER, *rows)
    )


def _quoted(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= _TEXT_MAX else f"{shown[: _TEXT_MAX - 4]}...{shown[-1]}"
