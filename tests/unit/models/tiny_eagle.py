"""Tiny EAGLE-3 heads, and a reference of them in plain torch from their public definition (arXiv 2503.01840) over
transformers' hidden states."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu, softmax

from tests.unit.models.tiny import save_tiny

# A layer of other sizes than the models', with fewer tokens.
LAYER: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
DRAFTED = 40
# Every tiny model gets this many layers, and its head reads their inputs.
LAYERS = 4
READS = (1, 2, 3)


class EagleReference:
    """A model and its head. Methods are those of `tests.unit.models.tiny_mtp.MTPReference`.

    Args:
        model: transformers' model.
        config: of the head.
        tensors: of the head's checkpoint, by its authors' names.
    """

    def __init__(self, model: Any, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.model = model
        self.config = config
        self.tensors = tensors

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """The states [T,D] that the head reads after the tokens: `hidden_states` has what each layer reads."""
        found = self.model.model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
        return linear(torch.cat([found[index][0] for index in READS], -1), self.tensors["fc.weight"])

    @torch.inference_mode()
    def drafted(self, next_tokens: list[int], states_TD: Tensor) -> Tensor:
        """The head's hidden states [T,D] at all positions, given the token after each of them."""
        embedding = self.tensors.get("embed_tokens.weight", self.model.model.embed_tokens.weight)
        embedded_TD = embedding[torch.tensor(next_tokens)]
        normed_TD = self._norm("midlayer.hidden_norm", states_TD)
        joined_TX = torch.cat((self._norm("midlayer.input_layernorm", embedded_TD), normed_TD), -1)
        stream_TD = normed_TD if self.config.get("norm_before_residual") else states_TD
        stream_TD = stream_TD + self._attended(joined_TX)
        normed_TD = self._norm("midlayer.post_attention_layernorm", stream_TD)
        gate_TI, up_TI = self._product("mlp.gate_proj", normed_TD), self._product("mlp.up_proj", normed_TD)
        return stream_TD + self._product("mlp.down_proj", silu(gate_TI) * up_TI)

    @torch.inference_mode()
    def logits(self, drafted_TD: Tensor) -> Tensor:
        """Logits [T,V] of the model's tokens, from the head's hidden states."""
        logits_TW = linear(self._norm("norm", drafted_TD), self.tensors["lm_head.weight"])
        if "d2t" not in self.tensors:
            return logits_TW
        logits_TV = torch.full((len(logits_TW), self.model.config.vocab_size), -torch.inf)
        for token, offset in enumerate(self.tensors["d2t"].tolist()):
            logits_TV[:, token + offset] = logits_TW[:, token]
        return logits_TV

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The tokens that the head drafts after these, each the most likely one."""
        states_TD, following = self.read(tokens[:-1]), tokens[1:]
        drafts: list[int] = []
        for _ in range(count):
            drafted_TD = self.drafted(following, states_TD)
            drafts.append(int(self.logits(drafted_TD[-1:])[0].argmax()))
            states_TD, following = torch.cat((states_TD, drafted_TD[-1:])), [*following, drafts[-1]]
        return drafts

    def _attended(self, joined_TX: Tensor) -> Tensor:
        size, count = self.config["head_dim"], len(joined_TX)
        angles_TP = torch.arange(count)[:, None] / self.config["rope_theta"] ** (torch.arange(0, size, 2) / size)
        cos_TC, sin_TC = (torch.cat((each, each), -1)[:, None] for each in (angles_TP.cos(), angles_TP.sin()))

        def turned(x_THC: Tensor) -> Tensor:
            first, second = x_THC.chunk(2, -1)
            return x_THC * cos_TC + torch.cat((-second, first), -1) * sin_TC

        q, k, v = (self._product(f"self_attn.{name}_proj", joined_TX).unflatten(-1, (-1, size)) for name in "qkv")
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("thc,shc->hts", turned(q), turned(k)) * size**-0.5
        scores = scores + torch.full((count, count), -torch.inf).triu(1)
        out_TX = torch.einsum("hts,shc->thc", softmax(scores, -1), v).flatten(1)
        return self._product("self_attn.o_proj", out_TX)

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        weight_D = self.tensors[f"{name}.weight"]
        return rms_norm(x_TD, weight_D.shape, weight_D, self.config["rms_norm_eps"])

    def _product(self, name: str, x_TX: Tensor) -> Tensor:
        return linear(x_TX, self.tensors[f"midlayer.{name}.weight"])


def save_with_head(
    name: str,
    directory: Path,
    head: Path,
    *,
    config: Mapping[str, Any] | None = None,
    changed: Mapping[str, Any] | None = None,
    own_embedding: bool = False,
    drafted: int = DRAFTED,
) -> EagleReference:
    """Saves a tiny model of some family to `directory`, and a random head for it to `head`.

    Args:
        config: fields of the head's config with other values.
        changed: fields of the model's config with other values.
        own_embedding: the head has an embedding.
        drafted: number of the head's tokens; those of the model: there is no table.
    """
    model = save_tiny(name, directory, changed={"num_hidden_layers": LAYERS} | dict(changed or {}))
    hidden_size, vocab_size = model.config.hidden_size, model.config.vocab_size
    fields = LAYER | dict(config or {})
    generator = torch.Generator().manual_seed(9)

    def matrix(rows: int, columns: int, std: float = 0.2) -> Tensor:
        return torch.empty(rows, columns).normal_(std=std, generator=generator)

    heads, kv_heads = (fields[field] * fields["head_dim"] for field in ("num_attention_heads", "num_key_value_heads"))
    channels = fields["intermediate_size"]
    tensors = {
        "fc.weight": matrix(hidden_size, len(READS) * hidden_size),
        "lm_head.weight": matrix(drafted, hidden_size, 0.5),
        "midlayer.self_attn.q_proj.weight": matrix(heads, 2 * hidden_size),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads, 2 * hidden_size),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads, 2 * hidden_size),
        "midlayer.self_attn.o_proj.weight": matrix(hidden_size, heads),
        "midlayer.mlp.gate_proj.weight": matrix(channels, hidden_size),
        "midlayer.mlp.up_proj.weight": matrix(channels, hidden_size),
        "midlayer.mlp.down_proj.weight": matrix(hidden_size, channels),
    }
    norms = ("norm", *(f"midlayer.{norm}" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {f"{norm}.weight": torch.empty(hidden_size).uniform_(0.5, 1.5, generator=generator) for norm in norms}
    if own_embedding:
        tensors["embed_tokens.weight"] = matrix(vocab_size, hidden_size)
    if drafted < vocab_size:
        tokens = torch.randperm(vocab_size, generator=generator)[:drafted].sort().values
        tensors["d2t"] = tokens - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(vocab_size), tokens)
    fields |= {"hidden_size": hidden_size, "vocab_size": vocab_size, "draft_vocab_size": drafted}
    fields.setdefault("eagle_aux_hidden_state_layer_ids", list(READS))
    save_head(head, fields, tensors)
    return EagleReference(model, fields, tensors)


def save_head(directory: Path, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Saves a head in its authors' form."""
    directory.mkdir(exist_ok=True)
    given = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(given | {"max_position_embeddings": 32} | dict(fields)))
    _save(tensors, directory)


# The token that a good model reads besides the newest one is this many places before it.
DISTANCE = 20


def save_with_good_head(directory: Path, head: Path, *, vocab_size: int = 61) -> None:
    """Saves a model and its head. The model's next token depends on its newest token and on the token `DISTANCE` places
    before. The head computes the same from its own KV, so it is right as long as it has the KV of those places.

    The first layer's attention looks at one place only: its keys are the same number everywhere, and its queries are
    turned by the distance. The other layers add nothing. In the head, half of the query heads look at the newest place,
    for the part that is the residual stream in the model; its own residual stream is 0.
    """
    size, heads, head_dim, layers, eps = 64, 4, 16, 7, 1e-6
    shape = {"hidden_size": size, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
    changed = shape | {"vocab_size": vocab_size, "num_hidden_layers": layers, "tie_word_embeddings": False}
    model = save_tiny("llama", directory, changed=changed | {"rms_norm_eps": eps, "intermediate_size": 16})
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
    embedding_VD = torch.empty(vocab_size, size).normal_(generator=generator)
    embedding_VD[:, 0] = 0.0
    embedding_VD *= (size - 1) ** 0.5 * embedding_VD.norm(dim=1, keepdim=True).reciprocal()
    embedding_VD[:, 0] = 1.0  # the norm of every row leaves this channel 1
    rope_theta = model.config.rope_parameters["rope_theta"]
    far, near = _constant(DISTANCE, size, head_dim, rope_theta), _constant(0, size, head_dim, rope_theta)
    mixing = torch.linalg.qr(torch.empty(size, size).normal_(generator=generator)).Q
    tokens = torch.arange(0, vocab_size, 3)  # that the model can answer and the head can draft
    lm_head_VD = torch.zeros(vocab_size, size)
    lm_head_VD[tokens] = torch.empty(len(tokens), size).normal_(std=2.0, generator=generator)
    first = "model.layers.0.self_attn"
    tensors |= {
        "model.embed_tokens.weight": embedding_VD,
        "lm_head.weight": lm_head_VD,
        f"{first}.q_proj.weight": far.repeat(heads, 1),
        f"{first}.k_proj.weight": near.repeat(heads, 1),
        f"{first}.v_proj.weight": torch.eye(size),
        f"{first}.o_proj.weight": mixing,
    }
    _save(tensors, directory)
    nothing, ones = torch.zeros(size, size), torch.ones(size)
    layer = {
        "self_attn.q_proj": torch.cat((near.repeat(heads, 1), far.repeat(heads, 1))),
        "self_attn.k_proj": near.repeat(2 * heads, 1),
        "self_attn.v_proj": torch.eye(size).repeat(2, 1),
    }
    tensors = {
        f"midlayer.{name}.weight": torch.cat((weight, torch.zeros_like(weight)), 1) for name, weight in layer.items()
    }
    tensors |= {
        "midlayer.self_attn.o_proj.weight": torch.cat((torch.eye(size), mixing), 1),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": torch.zeros(size),
        "midlayer.post_attention_layernorm.weight": ones,
        "midlayer.mlp.gate_proj.weight": nothing[:16],
        "midlayer.mlp.up_proj.weight": nothing[:16],
        "midlayer.mlp.down_proj.weight": nothing[:, :16],
        "norm.weight": ones,
        "fc.weight": torch.cat((torch.eye(size), nothing, nothing), 1),
        "lm_head.weight": lm_head_VD[tokens],
        "d2t": tokens - torch.arange(len(tokens)),
    }
    fields: dict[str, Any] = shape | {
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": 2 * heads,
        "intermediate_size": 16,
    }
    fields |= {"vocab_size": vocab_size, "draft_vocab_size": len(tokens), "rms_norm_eps": eps}
    save_head(head, fields | {"rope_theta": rope_theta, "norm_before_residual": True}, tensors)


def _constant(distance: int, size: int, head_dim: int, rope_theta: float) -> Tensor:
    """Weights [head_dim,size] that give the same vector for every token: with the one for a distance as query and the
    one for 0 as key, the score is by far the largest at that distance."""
    angles = -distance / rope_theta ** (torch.arange(0, head_dim, 2) / head_dim)
    weight = torch.zeros(head_dim, size)
    weight[:, 0] = 8 * torch.cat((angles.cos(), angles.sin()))
    return weight


def _save(tensors: Mapping[str, Tensor], directory: Path) -> None:
    plain = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
