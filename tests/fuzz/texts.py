"""Targets: grammars, chat templates, what models write, and traces of requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from baton.core.types import Grammar, GrammarKind
from baton.gateway.text.chat.json_request import chat_request
from baton.gateway.text.chat.model import read_chat_model
from baton.gateway.text.chat.parsing.lenient_json import ArgumentReader
from baton.grammar.compiler import GrammarCompiler
from baton.load.traces import read_trace
from baton.settings.config import DEMO_MODELS, tokenizer_file
from tests.fuzz import mutate
from tests.fuzz.folders import in_folders
from tests.fuzz.languages import GRAMMARS, JINJA, expand
from tests.fuzz.target import Case, Target, Targets
from tests.integration.chatting import TEMPLATE
from tests.unit.gateway.chat.checkpoints import SPECIAL, TEMPLATES, TEXTS
from tests.unit.gateway.chat.outputs import cut, parse
from tests.unit.gateway.chat.test_parsing import FORMATS

_CHATS: tuple[object, ...] = (
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
)
_MARKS = (
    *SPECIAL,
    *TEXTS,
    '{"name": "f", "arguments": {"a": 1}}',
    '"arguments"',
    '"name": "f"',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "f(a=1)",
    "g.h(x='a', y=[1])",
    "<function=f>",
    "<parameter=n>",
    "3",
    "</parameter>",
    "</function>",
    "[TOOL_CALLS]",
    "f",
    "[ARGS]",
    " to=functions.f",
    "<|constrain|>json",
    "analysis",
    "final",
    "commentary",
    "```json\n",
    "\n```",
    "function",
    "\n",
    " ",
    "é",
    "\ud83d",
    "NaN",
    "1e999",
    "null",
    "'",
    ":",
    ",",
    '{"a": [1, "b',
    "\\ud83d",
    "\x01",
    "True",
    "<function=g>",
    "<parameter=o>",
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>",
    "<tool_sep>",
    "</tool_calls>",
    "<longcat_arg_key>o</longcat_arg_key><longcat_arg_value>",
    "functions.f:0<|tool_call_argument_begin|>{",
    '<invoke name="f"><parameter name="n">',
    "</invoke>",
    '<｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="true">',
    "</｜DSML｜parameter>",
    "functools[",
    "```tool_code\nf(a=",
    "call:f{n:",
    "s:<escape>",
)
_TRACES = (
    b'{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n'
    b'{"timestamp": 9, "input_length": 6, "output_length": 3, "hash_ids": []}\n',
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
    b'{"at_s": 0.5, "prompt_tokens": 3, "output_tokens": 1, "prefix_ids": [1, 2], "prefix_tokens": 2}\n',
)


def make_grammar(random: Random) -> Case:
    kind = random.choice(list(GRAMMARS))
    text = expand(random, GRAMMARS[kind]).encode()
    return kind.value.encode(), mutate.any_data(random, text) if random.random() < 0.3 else text


class _Grammars:
    """Compiles each grammar and follows a few tokens."""

    def __init__(self) -> None:
        self._compiler = GrammarCompiler(tokenizer_file(DEMO_MODELS / "llama"), 4100, (4095,))

    def __call__(self, case: Case) -> str:
        kinds = {kind.value.encode(): kind for kind in GrammarKind}
        kind = kinds.get(case[0], GrammarKind.REGEX)
        matcher = self._compiler.matcher(Grammar(kind, case[1].decode(errors="surrogateescape")))
        for token_id in range(60, 66):
            if matcher.is_accepting:
                break
            matcher.consume(token_id)
        return f"taken {kind}"


def make_chat_template(random: Random) -> Case:
    if random.random() < 0.6:
        text = expand(random, JINJA)
    else:
        text = mutate.text(random, random.choice((TEMPLATE, *TEMPLATES.values())))
    config = {"chat_template": text, "bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "pad_token": None}
    if random.random() < 0.2:
        config = mutate.json_value(random, config)
    chat = json.dumps(mutate.json_value(random, random.choice(_CHATS))).encode()
    data = json.dumps(config).encode()
    return (mutate.data(random, data) if random.random() < 0.05 else data), chat


def chat_template(folder: Path, case: Case) -> None:
    (folder / "tokenizer_config.json").write_bytes(case[0])
    model = read_chat_model(folder, None)
    try:
        chat = json.loads(case[1])
    except (ValueError, RecursionError):
        return
    if not isinstance(chat, dict):
        return
    request = chat_request(chat)
    prepared = model.prepare(request)
    model.parser(request, prepared, "seed").push("<think>a</think>")


def make_outputs(random: Random) -> Case:
    """The format's number, where the text is cut, and the text."""
    text = "".join(
        random.choice(_MARKS) if random.random() < 0.85 else mutate.text(random, "text")
        for _ in range(random.choice((1, 3, 6, 12, 30)))
    )
    return bytes([random.randrange(len(FORMATS))]), random.randbytes(random.randrange(5)), text.encode(errors="replace")


def outputs(case: Case) -> str:
    """What a model wrote. How it was cut into pieces changes nothing, and arguments are JSON and can be read back."""
    names = list(FORMATS)
    read = FORMATS[names[sum(case[0]) % len(names)]]
    text = case[2].decode(errors="replace")
    whole, limited = parse(read, [text]), parse(read, [text], cut=True)
    assert parse(read, cut(text, case[1])) == whole
    assert parse(read, cut(text, case[1]), cut=True) == limited
    for _, arguments in whole.calls:
        json.loads(arguments, parse_constant=_not_json)
    for _, arguments in (*whole.calls, *limited.calls):
        json.dumps(ArgumentReader().read(arguments), allow_nan=False, ensure_ascii=False).encode()
    return f"taken {len(whole.calls)} calls"


def _not_json(constant: str) -> object:
    raise AssertionError(constant)


def make_trace(random: Random) -> Case:
    return (mutate.any_data(random, random.choice(_TRACES)),)


def trace(folder: Path, case: Case) -> None:
    path = folder / "trace.jsonl"
    path.write_bytes(case[0])
    read_trace(path)


@contextmanager
def text_targets() -> Iterator[Targets]:
    with in_folders(((make_chat_template, chat_template), (make_trace, trace))) as targets:
        grammars = {"grammar": Target(make_grammar, _Grammars()), "outputs": Target(make_outputs, outputs)}
        yield {**targets, **grammars}
