"""The tokens that one process produces: transformers on the same checkpoint, greedy, fp32."""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from baton.settings.config import tokenizer_file


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    logprobs: list[float]
    margins: list[float]  # between the best and the second logit


class Reference:
    """A checkpoint in transformers. Computes each continuation once."""

    def __init__(self, directory: Path) -> None:
        self._known: dict[tuple[tuple[int, ...], int], Expected] = {}
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file(directory)))

    def greedy(self, prompt: list[int], max_tokens: int) -> Expected:
        """Greedy continuation, end of sequence ignored."""
        key = tuple(prompt), max_tokens
        if key not in self._known:
            self._known[key] = self._greedy(prompt, max_tokens)
        return self._known[key]

    @torch.inference_mode()
    def _greedy(self, prompt: list[int], max_tokens: int) -> Expected:
        output = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
            eos_token_id=None,
        )
        token_ids = output.sequences[0, len(prompt) :].tolist()
        logits_TV = torch.stack(output.logits)[:, 0].double()
        logprobs = torch.log_softmax(logits_TV, -1)[torch.arange(len(token_ids)), token_ids]
        best_T2 = logits_TV.topk(2).values
        return Expected(token_ids, logprobs.tolist(), (best_T2[:, 0] - best_T2[:, 1]).tolist())

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        """Prompts of exactly these lengths in tokens, each from another part of the standard library's docs."""
        return prompts(self.tokenizer, lengths)


class References(dict[Path, Reference]):
    """The reference of each checkpoint, loaded on first use."""

    def __missing__(self, directory: Path) -> Reference:
        self[directory] = Reference(directory)
        return self[directory]


def prompts(tokenizer: Tokenizer, lengths: list[int]) -> list[list[int]]:
    import argparse
    import asyncio
    import collections
    import difflib
    import json
    import logging
    import subprocess
    import unittest

    modules = [argparse, asyncio, collections, difflib, json, logging, subprocess, unittest]
    words = "\n".join(
        str(getattr(module, name).__doc__) for module in modules for name in dir(module) if not name.startswith("_")
    )
    token_ids = tokenizer.encode(words).ids
    starts = range(0, len(token_ids), 97)
    found = [token_ids[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    assert [len(prompt) for prompt in found] == lengths
    return found
