"""Tiny checkpoints with a layer for multi-token prediction, and a reference of that layer in plain torch around
transformers' decoder layer. transformers itself drops the layer."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from tests.unit.models.tiny import save_tiny

_OWN = ("enorm", "hnorm", "shared_head.norm")


@dataclass(frozen=True)
class Published:
    """How publishers store an MTP layer.

    Args:
        layer: prefix of the layer within; None: it is after the model's last layer.
        own: the names of the other modules by DeepSeek-V3's; None: those, with the prefix of the layer within.
        hidden_first: the projection reads the hidden state first.
        offset: what is added to the stored weights of norms.
        before_last_norm: the layer reads hidden states before the model's last norm.
        copies: whether copies of the embedding and the head are stored too.
    """

    layer: str | None = None
    own: dict[str, str] | None = None
    hidden_first: bool = False
    offset: float = 0.0
    before_last_norm: bool = False
    copies: bool = True

    def prefix(self, num_layers: int) -> str:
        return f"model.layers.{num_layers}." if self.layer is None else self.layer

    def name(self, tensor: str, num_layers: int) -> str:
        """The stored name of a tensor, given DeepSeek-V3's."""
        if self.own is None:
            return self.prefix(num_layers) + tensor
        module, _, parameter = tensor.rpartition(".")
        return f"{self.own[module]}.{parameter}"


DEEPSEEK = Published()
_QWEN = Published(
    layer="mtp.layers.0.",
    own={
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "shared_head.norm": "mtp.norm",
    },
    offset=1.0,
    copies=False,
)
_MIMO = Published(
    layer="model.mtp_layers.0.",
    own={
        "enorm": "model.mtp_layers.0.token_layernorm",
        "hnorm": "model.mtp_layers.0.hidden_layernorm",
        "eh_proj": "model.mtp_layers.0.input_proj",
        "shared_head.norm": "model.mtp_layers.0.final_layernorm",
    },
    hidden_first=True,
    before_last_norm=True,
    copies=False,
)
# Architectures that transformers lacks: its own model of the same layers.
_SAME_LAYERS = {"mimo": ("qwen2", "MiMoForCausalLM")}
# The families that are not stored as DeepSeek-V3 is, and the fields by which their last layer attends to all tokens.
_PUBLISHED = {"qwen3-next": _QWEN, "qwen3.5": _QWEN, "qwen3.5-moe": _QWEN, "mimo": _MIMO}
_HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"]}
_GOOD: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"num_hidden_layers": 4, "first_k_dense_replace": 0},
    "deepseek-v32": {"num_hidden_layers": 4, "first_k_dense_replace": 0},
    "mimo": {"num_hidden_layers": 4},
    "qwen3-next": {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
    },
}
_CHANGED: dict[str, dict[str, Any]] = dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), _HYBRID) | {
    "glm-moe-dsa-shared-selection": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "shared", "full"],
    }
}


class MTPReference:
    """A model and its MTP layer (arXiv 2412.19437, equations 21 to 23).

    Args:
        layers: transformers' model with one layer more than the checkpoint says, which is the one within the MTP layer.
        own: the other tensors of the MTP layer, by DeepSeek-V3's names without prefix.
    """

    def __init__(self, layers: Any, own: dict[str, Tensor], published: Published = DEEPSEEK) -> None:
        self.model = layers
        self.published = published
        self.decoder = layers.model
        self.own = own
        *main, self.layer = self.decoder.layers
        self.main, self.norm = torch.nn.ModuleList(main), self.decoder.norm
        self.decoder.layers = self.main

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> Tensor:
        """The model's hidden states after its last norm [T,D]."""
        found: Tensor = self.decoder(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return found

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """What the MTP layer reads of the model's hidden states [T,D]."""
        self.decoder.norm = torch.nn.Identity() if self.published.before_last_norm else self.norm
        try:
            return self.hidden(tokens)
        finally:
            self.decoder.norm = self.norm

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor) -> Tensor:
        found: Tensor = self.model.lm_head(hidden_TD)
        return found

    @torch.inference_mode()
    def drafted(self, next_tokens: list[int], hidden_TD: Tensor) -> Tensor:
        """The MTP layer's hidden states [T,D] at all positions, given the token after each of them."""
        embedded_TD = self.decoder.embed_tokens(torch.tensor(next_tokens))
        halves = self._normed(embedded_TD, "enorm"), self._normed(hidden_TD, "hnorm")
        joined_TX = torch.cat(halves[::-1] if self.published.hidden_first else halves, -1)
        stream_TD = linear(joined_TX, self.own["eh_proj.weight"])
        # transformers' decoder makes mask and angles, and runs the one layer.
        config = self.decoder.config
        types = getattr(config, "layer_types", None)
        self.decoder.layers, self.decoder.norm = torch.nn.ModuleList([self.layer]), torch.nn.Identity()
        try:
            if types is not None:
                config.layer_types = types[-1:]
            out_TD: Tensor = self.decoder(inputs_embeds=stream_TD[None], use_cache=False).last_hidden_state[0]
        finally:
            self.decoder.layers, self.decoder.norm = self.main, self.norm
            if types is not None:
                config.layer_types = types
        return self._normed(out_TD, "shared_head.norm")

    def _normed(self, x_TD: Tensor, norm: str) -> Tensor:
        weight = self.own[f"{norm}.weight"] + self.published.offset
        return rms_norm(x_TD, x_TD.shape[-1:], weight, self.model.config.rms_norm_eps)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The tokens that the layer drafts after these, each the most likely one."""
        hidden_TD, following = self.read(tokens[:-1]), tokens[1:]
        drafts: list[int] = []
        for _ in range(count):
            drafted_TD = self.drafted(following, hidden_TD)
            drafts.append(int(self.logits(drafted_TD[-1]).argmax()))
            hidden_TD, following = torch.cat((hidden_TD, drafted_TD[-1:])), [*following, drafts[-1]]
        return drafts


def save_with_mtp(name: str, directory: Path, *, changed: dict[str, Any] | None = None) -> MTPReference:
    """Saves a tiny model with an MTP layer to `directory`, with the copies of embedding and head that publishers store
    too.

    Args:
        changed: fields of the config with other values; `num_hidden_layers` counts the MTP layer.
    """
    same, architecture = _SAME_LAYERS.get(name, (name, ""))
    whole = save_tiny(same, directory, changed=_CHANGED.get(name, {}) | (changed or {}))
    if architecture:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture]}))
    num_layers, size = whole.config.num_hidden_layers - 1, whole.config.hidden_size
    own, published = _own_tensors(size), _PUBLISHED.get(name, DEEPSEEK)
    take_last_layer(directory, num_layers, own, published)
    return MTPReference(whole, own, published)


def save_with_good_layer(directory: Path, name: str = "deepseek-v3", *, changed: dict[str, Any] | None = None) -> None:
    """Saves a model whose MTP layer nearly predicts what the model does: it is the model's first layer, reads only the
    embeddings, and the other layers add nothing. What it lacks is the sequence's first token, so its drafts depend on
    KV of all others.

    Args:
        changed: as for `save_with_mtp`.
    """
    fields = _GOOD[name] | (changed or {})
    save_with_mtp(name, directory, changed=fields)
    path, published = directory / "model.safetensors", _PUBLISHED.get(name, DEEPSEEK)
    tensors, num_layers = load_file(path), fields["num_hidden_layers"] - 1
    first, mtp = "model.layers.0.", published.prefix(num_layers)
    for each, tensor in tensors.items():
        if any(last in each for last in ("o_proj", "out_proj", "down_proj")) and not each.startswith((first, mtp)):
            tensor.zero_()
    tensors |= {mtp + each.removeprefix(first): tensor for each, tensor in tensors.items() if each.startswith(first)}
    embedding_VD = tensors["model.embed_tokens.weight"]
    size = embedding_VD.shape[1]
    halves = torch.eye(size), torch.zeros(size, size)
    own = {
        "enorm.weight": torch.ones(size) - published.offset,
        "eh_proj.weight": torch.cat(halves[::-1] if published.hidden_first else halves, 1),
        "shared_head.norm.weight": tensors["model.norm.weight"],
    }
    tensors |= {published.name(each, num_layers): tensor for each, tensor in own.items()}
    tensors["model.embed_tokens.weight"] = embedding_VD * embedding_VD.square().mean(1, keepdim=True).rsqrt()
    save_file({each: tensor.clone() for each, tensor in tensors.items()}, path, metadata={"format": "pt"})


def take_last_layer(
    directory: Path, num_layers: int, own: dict[str, Tensor] | None = None, published: Published = DEEPSEEK
) -> None:
    """Makes the last layer of a checkpoint the one within an MTP layer, with these other tensors.

    Args:
        num_layers: of the model without that layer.
    """
    tensors = load_file(directory / "model.safetensors")
    last, prefix = f"model.layers.{num_layers}.", published.prefix(num_layers)
    assert any(each.startswith(last) for each in tensors)
    tensors = {re.sub(f"^{re.escape(last)}", prefix, name): tensor for name, tensor in tensors.items()}
    embedding = tensors["model.embed_tokens.weight"]
    own = own or _own_tensors(embedding.shape[1])
    tensors |= {published.name(each, num_layers): tensor for each, tensor in own.items()}
    if published.copies:
        tensors[f"{prefix}embed_tokens.weight"] = embedding
        tensors[f"{prefix}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding)
    tensors = {each: tensor.clone() for each, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    for types in config.keys() & {"mlp_layer_types", "layer_types", "indexer_types"}:
        config[types] = config[types][:num_layers]
    path.write_text(json.dumps(config))


def _own_tensors(size: int) -> dict[str, Tensor]:
    """The tensors of an MTP layer besides those of the layer within."""
    generator = torch.Generator().manual_seed(5)
    own = {f"{norm}.weight": torch.empty(size).uniform_(0.5, 1.5, generator=generator) for norm in _OWN}
    return own | {"eh_proj.weight": torch.empty(size, 2 * size).normal_(std=0.2, generator=generator)}
