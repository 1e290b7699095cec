"""Converts tiktoken-style tokenizers, which are bytes with ranks: Kimi's tiktoken.model and Mistral's tekken.json.
Pure."""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.models.loading.tokenizer_files.document import added_of_config, added_token, document, merges_of

# Kimi's own code has it: runs of Han characters first, then words as in o200k, without Han characters in them.
_NO_HAN = r"&&[^\p{Han}]]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + _NO_HAN, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + _NO_HAN
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Kimi's numbers after the ranks; those without a name in tokenizer_config.json are reserved.
_KIMI_SPECIAL_TOKENS = 256 + 2
_SPECIAL_TOKENS_MAX = 1 << 16
# tekken.json before version 8 has no list of special tokens.
_TEKKEN_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def read_ranks(text: str) -> dict[bytes, int]:
    """Reads the lines of a tiktoken file, each a token in base64 and its rank.

    Raises:
        ValueError: a line is something else, or ranks are not 0, 1, 2...
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} is not a token in base64 and its rank") from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not 0, 1, 2, ..., each once")
    return ranks


def convert_kimi(text: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes tokenizer.json from a tiktoken.model with Kimi's pattern.

    Args:
        config: tokenizer_config.json.

    Raises:
        ValueError: see `read_ranks`.
    """
    ranks = read_ranks(text)
    named = added_of_config(config, {})
    numbers = range(len(ranks), len(ranks) + _KIMI_SPECIAL_TOKENS)
    added = [named.get(number) or added_token(f"<|reserved_token_{number}|>", number) for number in numbers]
    return _byte_level(ranks, KIMI_PATTERN, added, offset=0, bos=None)


def convert_tekken(text: str) -> dict[str, Any]:
    """Makes tokenizer.json from a tekken.json.

    Raises:
        ValueError, KeyError, TypeError: it has another form.
    """
    tekken = json.loads(text)
    config = tekken["config"]
    count = int(config["default_num_special_tokens"])
    size = int(config["default_vocab_size"]) - count
    if not 0 <= count <= _SPECIAL_TOKENS_MAX or not 0 <= size <= len(tekken["vocab"]):
        raise ValueError(f"its config has {count} special tokens and {size} others of {len(tekken['vocab'])}")
    ranks = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in tekken["vocab"][:size]}
    if sorted(ranks.values()) != list(range(size)):
        raise ValueError(f"its first {size} tokens do not have the ranks 0, 1, 2, ..., each once")
    listed = tekken.get("special_tokens")
    names = _TEKKEN_SPECIAL_TOKENS if listed is None else _in_order(listed)
    if len(names) > count:
        raise ValueError(f"it has {len(names)} special tokens, and its config has room for {count}")
    names = (*names, *(f"<SPECIAL_{number}>" for number in range(len(names), count)))
    added = [added_token(name, number) for number, name in enumerate(names)]
    bos = ("<s>", names.index("<s>")) if "<s>" in names else None
    return _byte_level(ranks, str(config["pattern"]), added, offset=count, bos=bos)


def _in_order(listed: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    names = tuple(str(token["token_str"]) for token in sorted(listed, key=lambda token: int(token["rank"])))
    if sorted(int(token["rank"]) for token in listed) != list(range(len(names))):
        raise ValueError("its special tokens do not have the ranks 0, 1, 2, ..., each once")
    return names


def _byte_level(
    ranks: Mapping[bytes, int],
    pattern: str,
    added: Sequence[dict[str, Any]],
    *,
    offset: int,
    bos: tuple[str, int] | None,
) -> dict[str, Any]:
    letters = _letters()
    vocab = {"".join(map(letters.__getitem__, token)): rank + offset for token, rank in ranks.items()}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return document(
        vocab=vocab,
        merges=merges_of(vocab, sorted(vocab, key=vocab.__getitem__)),
        added=added,
        bos=bos,
        model={"fuse_unk": False, "byte_fallback": False, "ignore_merges": True},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]},
        decoder=level,
    )


def _letters() -> dict[int, str]:
    """Returns the printable character that byte-level BPE writes for each byte."""
    printable = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
