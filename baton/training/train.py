"""The recipe of the demo models: tokenizer, shapes, training, and the folder in Hugging Face layout.

It reads the corpus that `corpus.py` wrote.
"""

import argparse
import copy
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from baton.training.corpus import END_OF_TEXT

VOCAB_SIZE = 4096
MAX_POSITIONS = 4096
SHORT = 256  # tokens of a row that holds one document
LONG = 2048  # tokens of a row that holds many
LONG_EVERY = 8  # steps
BATCH_TOKENS = 32768
IGNORED = -100  # the label that transformers' loss leaves out
ROUTER_BALANCE_WEIGHT = 0.01
EVALUATIONS = 40
Batch = tuple[Tensor, Tensor]  # ids and labels, both [rows, length]


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Trains a byte-level BPE whose last id is END_OF_TEXT; it adds nothing at either end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def shape(arch: str, eos_token_id: int | None) -> PreTrainedConfig:
    """The configuration of a model with about 5.3 million parameters."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 704,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "dtype": "bfloat16",
    }
    if arch == "llama":
        return LlamaConfig(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **common)
    return DeepseekV2Config(
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=96,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,  # transformers ignores this field for this architecture and does not normalize
        routed_scaling_factor=1.0,
        **common,
    )


class TrainingText:
    """Documents as one row of token ids, each ended by END_OF_TEXT, and the paragraphs in it."""

    def __init__(self, documents: list[str], tokenizer: Tokenizer, device: torch.device) -> None:
        end = tokenizer.encode(END_OF_TEXT).ids
        gap = tokenizer.encode("\n\n").ids
        tokens: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        for document in documents:
            before = len(starts)
            for encoding in tokenizer.encode_batch(document.split("\n\n")):
                tokens += gap if len(starts) > before else []
                starts.append(len(tokens))
                tokens += encoding.ids
            tokens += end
            ends += [len(tokens)] * (len(starts) - before)
        self.tokens = torch.tensor(tokens, device=device)
        self._starts = torch.tensor(starts, device=device)  # of each paragraph
        self._ends = torch.tensor(ends, device=device)  # of the document that each paragraph is in

    def _rows(self, starts: Tensor, ends: Tensor, length: int) -> Batch:
        positions = starts[:, None] + torch.arange(length, device=starts.device)
        ids = self.tokens[positions.clamp(max=len(self.tokens) - 1)]
        return ids, ids.masked_fill(positions >= ends[:, None], IGNORED)

    def random_documents(self) -> Batch:
        """Rows that start at a random paragraph, as a prompt does, and count up to their document's end."""
        chosen = torch.randint(len(self._starts), (BATCH_TOKENS // SHORT,), device=self.tokens.device)
        return self._rows(self._starts[chosen], self._ends[chosen], SHORT)

    def random_stretches(self) -> Batch:
        """Long rows over many documents, so that far positions are trained too."""
        last = len(self.tokens) - LONG
        starts = torch.randint(last + 1, (BATCH_TOKENS // LONG,), device=self.tokens.device)
        return self._rows(starts, starts + LONG, LONG)

    def all_documents(self) -> Iterator[Batch]:
        """Every paragraph's row as in `random_documents`, once."""
        for starts, ends in zip(self._starts.split(128), self._ends.split(128), strict=True):
            yield self._rows(starts, ends, SHORT)

    def all_stretches(self) -> Iterator[Batch]:
        """The whole text in long rows."""
        starts = torch.arange(0, len(self.tokens), LONG, device=self.tokens.device)
        yield self._rows(starts, (starts + LONG).clamp(max=len(self.tokens)), LONG)


def add_dropout(model: nn.Module, probability: float) -> None:
    """Adds dropout of the embeddings and of each sublayer's output, which the architectures do not have."""

    def drop(module: nn.Module, _: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (functional.dropout(output[0], probability, module.training), *output[1:])
        return functional.dropout(output, probability, module.training)

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", ".self_attn", ".mlp")):
            module.register_forward_hook(drop)


class RouterBalance:
    """Collects, during a forward, the auxiliary loss that keeps experts evenly used (Switch Transformer, eq. 4)."""

    def __init__(self, model: nn.Module, top_k: int) -> None:
        self._top_k = top_k
        self._losses: list[Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(".mlp.gate"):
                module.register_forward_hook(self._collect)

    def _collect(self, gate: nn.Module, inputs: tuple[Tensor, ...], _: object) -> None:
        if not gate.training:
            return
        hidden = inputs[0].flatten(0, -2).float()
        probabilities = functional.linear(hidden, gate.get_parameter("weight").float()).softmax(-1)
        chosen = functional.one_hot(probabilities.topk(self._top_k).indices, probabilities.shape[-1]).sum(1).float()
        share = chosen.mean(0) / self._top_k
        self._losses.append(probabilities.shape[-1] * (share * probabilities.mean(0)).sum())

    def take(self) -> Tensor | float:
        """The mean over layers since the last call; 0 for a model without experts."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).mean() if losses else 0.0


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Mean loss per token in nats."""
    model.eval()
    total = count = 0.0
    for ids, labels in batches:
        tokens = int((labels[:, 1:] != IGNORED).sum())
        total += float(model(input_ids=ids, labels=labels).loss) * tokens
        count += tokens
    model.train()
    return total / count


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first twentieth, then a cosine down to a hundredth of the peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))))


def optimizer_of(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def train(
    model: nn.Module, training: TrainingText, held_out: TrainingText, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Trains the model, leaves the last or best weights in it, and returns the losses of documents during training."""
    balance = RouterBalance(model, getattr(model.config, "num_experts_per_tok", 1))
    add_dropout(model, options.dropout)
    optimizer = optimizer_of(model, options.weight_decay)
    autocast = torch.autocast(training.tokens.device.type, torch.bfloat16)
    losses: list[dict[str, float]] = []
    best = copy.deepcopy(model.state_dict())
    best_loss = math.inf
    recent: list[Tensor] = []
    progress = tqdm(range(options.steps), desc=options.arch, mininterval=2)
    for step in progress:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.lr)
        long = step % LONG_EVERY == LONG_EVERY - 1
        ids, labels = training.random_stretches() if long else training.random_documents()
        with autocast:
            loss = model(input_ids=ids, labels=labels).loss
        (loss + ROUTER_BALANCE_WEIGHT * balance.take()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not long:
            recent = [*recent[-49:], loss.detach()]
        if (step + 1) % max(1, options.steps // EVALUATIONS) and step + 1 != options.steps:
            continue
        with autocast:
            held_out_loss = evaluate(model, held_out.all_documents())
        losses.append({"step": step + 1, "train": torch.stack(recent).mean().item(), "held_out": held_out_loss})
        progress.set_postfix(losses[-1])
        if options.keep == "last" or held_out_loss < best_loss:
            best_loss = held_out_loss
            best = copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return losses


def save(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the folder that transformers loads: weights, configurations and tokenizer."""
    eos_token_id = tokenizer.token_to_id(END_OF_TEXT)
    model.generation_config = GenerationConfig(eos_token_id=eos_token_id, pad_token_id=eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=("llama", "deepseek"), required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--keep", choices=("best", "last"), default="last", help="which weights: best on held-out text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    documents, kept = (
        (options.corpus / name).read_text(encoding="utf-8").split(END_OF_TEXT) for name in ("train.txt", "heldout.txt")
    )
    tokenizer = train_tokenizer(documents)
    training, held_out = TrainingText(documents, tokenizer, device), TrainingText(kept, tokenizer, device)
    eos_token_id = tokenizer.token_to_id(END_OF_TEXT)
    model = AutoModelForCausalLM.from_config(
        shape(options.arch, eos_token_id), dtype=torch.float32, experts_implementation="eager"
    ).to(device)
    losses = train(model, training, held_out, options)

    save(model.to(torch.bfloat16), tokenizer, options.out)
    saved = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "train_tokens": len(training.tokens),
        "held_out_tokens": len(held_out.tokens),
        "held_out_documents": evaluate(model, held_out.all_documents()),
        "held_out_stretches": evaluate(model, held_out.all_stretches()),
    }
    (options.out / "losses.json").write_text(json.dumps({"saved": saved, "steps": losses}, indent=1) + "\n")
    print(json.dumps(saved))


if __name__ == "__main__":
    main()
