"""Writes docs/models.md from the table of families and transformers' lists of architectures; `make docs` calls it."""

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto

from baton.models.families.table import FAMILIES, FEATURES, ModelFeatures

PAGE = Path(__file__).resolve().parent / "models.md"

OUTCOMES = PAGE.parents[1] / "bench" / "results" / "families.json"

_INTRODUCTION = """# Models

`--model` names a directory in Hugging Face's form: `config.json`, safetensors, tokenizer. The first entry of
`architectures` decides which file of `baton/models/families/` computes the model. A field of `config.json` that asks
for an unsupported feature is an error that names the field; nothing is ignored silently.
"""

_NOTES = """- Of a multimodal model (`...ForConditionalGeneration`), Baton serves the language model.
- The tokenizer is `tokenizer.json`, or `tekken.json` of Mistral, `tiktoken.model` of Kimi or `tokenizer.model` of
  sentencepiece (BPE, as Llama 2 and Mistral have it), which is converted at the first start and kept in
  `~/.cache/baton/tokenizers`; other forms are refused by name. Converted tokenizers are tested against tiktoken and
  sentencepiece. Chat templates are read from `tokenizer_config.json` or `chat_template.jinja`, or given by
  `--chat-template`.
- Weights are float64, float32, float16 or bfloat16. If `config.json` names no dtype, Baton uses the largest
  tensor's dtype; float64 runs as float32.
- fp8 (e4m3) checkpoints of Llama's and DeepSeek's kin, Gemma, StarCoder2 and Nemotron run as they are stored: with
  scales for each tensor, for each row, or for each block of 128x128 numbers, as DeepSeek-V3 is published. Activations
  are quantized as the checkpoint says. On a CPU, and on GPUs whose tensor cores have no fp8, weights are dequantized
  before they are multiplied.
- Weights in packed integers run as they are stored, too: GPTQ (4 and 8 bits, with `desc_act`), AWQ (4 bits, `gemm`),
  and compressed-tensors (`pack-quantized` with 4 and 8 bits, by group or channel, with or without zeros; int8 w8a8,
  static or dynamic, without experts). gpt-oss runs as published, with experts in mxfp4, or in bfloat16. Other schemes,
  such as fp8 in e5m2, 3 bits or marlin's files, are refused by name. On a GPU, experts with `desc_act` are refused.
  [The figures](../bench/results/quantized.md): on an H200, a decode step of few requests with weights of 4 bits takes
  0.6 of bfloat16's time. The products of a layer take as long as bfloat16's from 48 tokens, 1.3 times as long from 128
  and 1.6 times from 512 tokens on.
- LongRoPE has two sets of factors. A node takes one for all requests, because keys turned by one are of no use to
  queries turned by the other: the short one, for contexts up to the original one, or the long one where
  `--max-context-tokens` asks for more. Give all nodes and gateways the same number; nodes that differ refuse each
  other. Rope type `dynamic` is served up to `max_position_embeddings`, where it is plain
  rotation.
- All families but Phi-3-small, which transformers does not have, are tested against transformers in float32: the logits
  are equal for whole prompts, prompts in chunks, single tokens, and batches of all three (`tests/unit/models`). Falcon
  with ALiBi differs: transformers rounds slope times position to bfloat16, Baton, as vLLM, does not. With more than 8
  heads, as all published models have, logits differ from the fourth token on, in tiny models by 0.001 after 16 tokens
  and by 0.05 to 0.09 after 257. With up to 8 heads slopes are powers of two, and logits are equal for 257 tokens.
- A cache in fp8 stores number / scale, rounded once, as vLLM does. Conversions at a hand-over divide as well.
- DeepSeek-V3.2 and GLM-5 attend to the tokens that an indexer selects (`index_topk`), its keys in a cache next to that
  of KV, of the same dtype. As transformers, Baton scores them in that dtype; the publisher's code turns them by a
  Hadamard matrix and rounds them to fp8 first. Of equal scores the first tokens are taken. On an H200,
  32 decodes are faster than with attention to all tokens from 8,000 tokens of context on, prompts from 16,000 on
  ([figures](../bench/results/sparse_mla.md)).
- Qwen3-Next and 3.5, Kimi-Linear, Granite 4, Nemotron-H, Bamba and LFM2 have recurrent layers, which keep one state
  of each request instead of KV; each layer of Falcon-H1 keeps both. The state travels with the KV, also between nodes
  of unequal numbers of ranks. A prompt begins after the last place of its prefix whose state is kept: a multiple of
  64 tokens and of the block size. States are kept at the last such place before a prompt's end, where a prompt
  departs from one before, where a step cuts a prompt, and while answers are decoded. The layers write the first two
  as they pass them, so no prompt takes another step for them. A prompt that comes again is reused from its second
  time on, a prefix of unequal prompts from its third. A hand-over brings the state, so the decode node gets only the
  blocks that it lacks, whatever states it keeps: of a conversation's next turn the new ones. A node holds
  three states for each request of a step; the least recently used make room. `--batch-invariant` keeps states of
  prompts only, where it cuts them. On an H200, steps captured as CUDA graphs gave the CPU's tokens for tiny models of
  LFM2, Qwen3-Next, Kimi-Linear, Granite 4 and Nemotron-H; their speed is on the
  [page of hybrids](../bench/results/hybrids.md).
- Each layer of LongCat-Flash has two attentions, so its cache has twice as many layers as the model. Experts without
  weights (`zero_expert_num`) take no memory and no products: a token's weights of these multiply its input. Files that
  ask for what transformers ignores (`router_bias`, `norm_topk_prob`) are refused. LongCat-Flash and Falcon-H1 were
  tested on CPUs only.
- Values of MiMo-V2-Flash have two thirds of their keys' channels, and its layers without a window half of the others'
  kv heads. A cache has one shape for all layers and for keys and values: zeros follow each value, and the heads of
  layers without a window are stored twice. So a token's KV takes 288 KiB in bfloat16, where 217.5 would do. As
  transformers, Baton counts `sliding_window_size` without the token itself, so 128 is a window of 129 tokens. In fp8 as
  published it runs on one or two ranks: on four, a rank's kv head of 192 channels would cut a block of 128. Its layers
  for multi-token prediction are not loaded. It was tested on CPUs only.
- `--expert-parallel` gives each rank of a mixture whole experts instead of some channels of all; attention, shared
  experts and the rest are split as before. Each rank computes its experts for all tokens, which all ranks have
  after attention, and their sum is the reduction that the layer has anyway: no tokens are exchanged. Experts of
  2,048 channels over 8 ranks stay products of 2,048 instead of 256, scales and packed groups need not divide, and
  the number of ranks need not divide the number of experts; against that, a step takes as long as its busiest rank:
  nodes count each expert's tokens, and `--redundant-experts` adds copies of the busy ones ([experts](experts.md)).
  All families with experts take it, in all their weights' forms.
- `--attention-data-parallel`, together with `--expert-parallel`, is for latent attention and experts: DeepSeek-V2, V3
  and V3.2, Kimi-K2, GLM-5. Without it every rank holds the latents of all requests; with it each rank holds those of
  its own requests, so a node has room for as many times the KV as it has ranks, less what whole attention weights
  take on each ([planning](planning.md#memory-of-the-kv-cache) has the bytes). A rank computes embedding, norms and
  attention of its own tokens. Before the experts and other MLPs, which stay split, ranks gather their tokens; after
  them they sum the parts, each for its own tokens. A request goes to the rank with most free blocks; each block of its
  prefix that a rank has cached counts as two. A hand-over goes from the rank that has the request to the rank that
  will have it, and the other node may have any number of ranks of either kind. One request has to fit into one rank's
  blocks. The attention of one prompt runs on one rank, so a prefill node with few prompts at a time is faster without
  it. Decodes run as CUDA graphs, steps with prompts do not. It takes no adapters and no recurrent layers. It is tested
  on a CPU, with two and four ranks; on GPUs it has not run yet.
- `--tensor-parallel-size` splits every family: each rank has some query heads with their kv heads, some channels of
  each MLP and expert, and some rows of the vocabulary. The number of ranks has to divide the query heads and the
  channels; fp8 weights in blocks need at least one block of channels for each rank. It also has to divide the kv heads
  or be a multiple of them; ranks that need the same kv head each have a copy. A dense model with one kv head may have
  unequal numbers of query heads on its ranks, as Falcon-7B with 71. Any other number of ranks is refused, and the error
  lists the numbers that work.
- [attention.md](attention.md) says which attention backend can serve which model. The size of one token's KV, and what
  each layer needs of attention, come from `baton/models/loading/needs.py`.
- [Adding a model family](adding-a-model.md) has a complete example.
"""

_NOT_SERVED = """Of the causal language models of transformers {version}, {served} are served, and these are not:"""


_PROOF = """`make test-families` ran tiny random models of each architecture on {date}, with Baton {version}, and wrote
the outcomes of this table (transformers {transformers}, PEFT {peft}, torch {torch}, all in float32 on a CPU). A form
has passed if all greedy tokens are those of the reference and the logarithms of their probabilities differ by less than
0.002:

- engine: one node, prompts in chunks and in one batch, then again from the prefix cache. The reference is transformers.
- pair: a prefill and a decode node with other blocks and another layout of the cache.
- 2 ranks: `--tensor-parallel-size 2`.
- fp8, int4: checkpoints in fp8 (by block of 128x128 where there are experts, else by channel) and in int4
  (compressed-tensors, in groups; gpt-oss in mxfp4). Experts that a checkpoint has in one tensor stay as they are. The
  reference is transformers with the dequantized weights.
- LoRA: an adapter of all linear layers, without those of experts. The reference is PEFT, which also saved it.
"""
_COLUMNS = {"engine": "engine", "pair": "pair", "tp2": "2 ranks", "fp8": "fp8", "int4": "int4", "lora": "LoRA"}


def page() -> str:
    """The page's text."""
    names = causal_lm_names()
    served = [name for name in names if name in FAMILIES]
    sentence = _NOT_SERVED.format(version=transformers.__version__, served=len(served))
    others = ", ".join(f"`{name}`" for name in names if name not in FAMILIES)
    sections = [
        _INTRODUCTION,
        *_table(),
        "",
        _NOTES,
        "## Proof",
        "",
        *_proof(),
        "",
        "## Not served",
        "",
        sentence,
        "",
        others,
    ]
    return "\n".join(sections) + "\n"


def causal_lm_names() -> list[str]:
    """The architectures that transformers makes by `AutoModelForCausalLM`, in alphabetical order."""
    return sorted(set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()), key=str.casefold)


def _table() -> list[str]:
    """A row for each run of architectures with the same file and features."""
    rows = ["| architecture | file | special features | attention features |", "|---|---|---|---|"]
    for (file, features), names in groupby(FAMILIES, _described):
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {listed} | `{file}` | {features.special} | {features.attention} |")
    return rows


def _proof() -> list[str]:
    """The outcomes of the last whole run, a row for each architecture, and the refusals below."""
    run = json.loads(OUTCOMES.read_text())
    notes: dict[str, int] = {}
    rows = [f"| architecture | {' | '.join(_COLUMNS.values())} |", f"|---{'|---' * len(_COLUMNS)}|"]
    for architecture in FAMILIES:
        models = run["cells"].get(architecture, {})
        cells = (_cell([row[column] for row in models.values() if column in row], notes) for column in _COLUMNS)
        rows.append(f"| `{architecture}` | {' | '.join(cells)} |")
    refusals = [f"{number}. {text}" for text, number in notes.items()]
    about = _PROOF.format(date=run["date"], version=run["version"], **run["libraries"])
    return [about, *rows, *(("", "Refusals:", "", *refusals) if refusals else ())]


def _cell(outcomes: list[tuple[str, str]], notes: dict[str, int]) -> str:
    """What became of an architecture's models in one form."""
    counts: Mapping[str, Any] = {what: [why for each, why in outcomes if each == what] for what, _ in outcomes}
    parts = []
    for what, reasons in counts.items():
        numbers = sorted({notes.setdefault(_note(why), len(notes) + 1) for why in reasons if why})
        some = f" ({len(reasons)} of {len(outcomes)} models)" if len(counts) > 1 else ""
        parts.append(what + some + "".join(f" [{number}]" for number in numbers))
    return ", ".join(parts) or "not run"


def _note(why: str) -> str:
    """Plain text, in which nothing is a mark of the page."""
    return re.sub(r"([*_|<>`])", r"\\\1", why)


def _described(architecture: str) -> tuple[str, ModelFeatures]:
    module = FAMILIES[architecture].model.partition(":")[0]
    return f"{module.rpartition('.')[2]}.py", FEATURES.get(architecture, ModelFeatures())


if __name__ == "__main__":
    PAGE.write_text(page())
