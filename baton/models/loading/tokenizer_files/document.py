"""The parts of a tokenizer.json that conversions share. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def document(
    *,
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    added: Sequence[dict[str, Any]],
    bos: tuple[str, int] | None = None,
    eos: tuple[str, int] | None = None,
    model: Mapping[str, object],
    **parts: object,
) -> dict[str, Any]:
    """Returns the file's content.

    Args:
        added: entries made by `added_token`. The library numbers them as the vocabulary does, so it has them too.
        bos, eos: tokens around every prompt.
        model: fields of the BPE model that are not null or false.
        parts: normalizer, pre_tokenizer and decoder.
    """
    with_added = {**vocab, **{token["content"]: token["id"] for token in added}}
    empty = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _around(bos, eos),
        **parts,
        "model": {"type": "BPE", **empty, **model, "vocab": with_added, "merges": [list(pair) for pair in merges]},
    }


def added_token(content: str, token_id: int, *, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def added_of_config(config: Mapping[str, Any], added: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """Returns added tokens by id, from tokenizer_config.json and added_tokens.json; entries of wrong types are left
    out."""
    tokens = {
        token_id: added_token(content, token_id)
        for content, token_id in added.items()
        if isinstance(token_id, int) and not isinstance(token_id, bool)
    }
    decoder = config.get("added_tokens_decoder")
    for token_id, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(token, Mapping) and isinstance(token.get("content"), str) and str(token_id).isdecimal():
            tokens[int(token_id)] = {
                **added_token(token["content"], int(token_id), special=bool(token.get("special", True))),
                **{name: bool(token.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")},
            }
    return tokens


def merges_of(vocab: Mapping[str, int], order: Iterable[str]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make another token, best first.

    Both kinds of originals join the neighbours whose joint token is best, whatever its parts; so every way to divide a
    token is a merge, and those of one token stand together.

    Args:
        order: tokens that merges may make, best first.
    """
    merges: list[tuple[str, str]] = []
    for token in order:
        # 262,144 tokens take seconds here, so no part is cut twice before it is known.
        pairs = [
            (left, token[cut:])
            for cut in range(1, len(token))
            if (left := token[:cut]) in vocab and token[cut:] in vocab
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += pairs
    return merges


def _around(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return None

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        before, after = (
            [] if token is None else [{"SpecialToken": {"id": token[0], "type_id": type_id}}] for token in (bos, eos)
        )
        return [*before, {"Sequence": {"id": name, "type_id": type_id}}, *after]

    tokens = [token for token in (bos, eos) if token is not None]
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in tokens},
    }
