"""Tiny checkpoints with a layer for multi-token prediction, and a reference of that layer in plain torch around
transformers' decoder layer. transformers itself drops the layer."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from tests.unit.models.tiny import save_tiny

_OWN = ("enorm", "hnorm", "shared_head.norm")


class MTPReference:
    """A model and its MTP layer (arXiv 2412.19437, equations 21 to 23).

    Args:
        layers: transformers' model with one layer more than the checkpoint says, which is the one within the MTP layer.
        own: the other tensors of the MTP layer, by their names without prefix.
    """

    def __init__(self, layers: Any, own: dict[str, Tensor]) -> None:
        self.model = layers
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
    def logits(self, hidden_TD: Tensor) -> Tensor:
        found: Tensor = self.model.lm_head(hidden_TD)
        return found

    @torch.inference_mode()
    def drafted(self, next_tokens: list[int], hidden_TD: Tensor) -> Tensor:
        """The MTP layer's hidden states [T,D] at all positions, given the token after each of them."""
        size, eps = hidden_TD.shape[-1:], self.model.config.rms_norm_eps
        embedded_TD = self.decoder.embed_tokens(torch.tensor(next_tokens))
        parts = (embedded_TD, self.own["enorm.weight"]), (hidden_TD, self.own["hnorm.weight"])
        joined_TX = torch.cat([rms_norm(x_TD, size, weight, eps) for x_TD, weight in parts], -1)
        stream_TD = linear(joined_TX, self.own["eh_proj.weight"])
        # transformers' decoder makes mask and angles, and runs the one layer.
        self.decoder.layers, self.decoder.norm = torch.nn.ModuleList([self.layer]), torch.nn.Identity()
        try:
            out_TD: Tensor = self.decoder(inputs_embeds=stream_TD[None], use_cache=False).last_hidden_state[0]
        finally:
            self.decoder.layers, self.decoder.norm = self.main, self.norm
        return rms_norm(out_TD, size, self.own["shared_head.norm.weight"], eps)

    def guesses(self, tokens: list[int], count: int) -> list[int]:
        """The tokens that the layer guesses after these, each the most likely one."""
        hidden_TD, following = self.hidden(tokens[:-1]), tokens[1:]
        guesses: list[int] = []
        for _ in range(count):
            drafted_TD = self.drafted(following, hidden_TD)
            guesses.append(int(self.logits(drafted_TD[-1]).argmax()))
            hidden_TD, following = torch.cat((hidden_TD, drafted_TD[-1:])), [*following, guesses[-1]]
        return guesses


def save_with_mtp(name: str, directory: Path, *, changed: dict[str, Any] | None = None) -> MTPReference:
    """Saves a tiny model with an MTP layer to `directory`, with the copies of embedding and head that publishers store
    too.

    Args:
        changed: fields of the config with other values; `num_hidden_layers` counts the MTP layer.
    """
    whole = save_tiny(name, directory, changed=changed)
    num_layers, size = whole.config.num_hidden_layers - 1, whole.config.hidden_size
    own = _own_tensors(size)
    take_last_layer(directory, num_layers, own)
    return MTPReference(whole, own)


def save_with_good_layer(directory: Path, *, changed: dict[str, Any] | None = None) -> None:
    """Saves a model whose MTP layer nearly predicts what the model does: it is the model's first layer, reads only the
    embeddings, and the other layers add nothing. What it lacks is the sequence's first token, so its guesses depend on
    KV of all others.

    Args:
        changed: as for `save_with_mtp`.
    """
    fields = {"num_hidden_layers": 4, "first_k_dense_replace": 0} | (changed or {})
    save_with_mtp("deepseek-v3", directory, changed=fields)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    first, mtp = "model.layers.0.", f"model.layers.{fields['num_hidden_layers'] - 1}."
    for name, tensor in tensors.items():
        if ("o_proj" in name or "down_proj" in name) and not name.startswith((first, mtp)):
            tensor.zero_()
    tensors |= {mtp + name.removeprefix(first): tensor for name, tensor in tensors.items() if name.startswith(first)}
    embedding_VD = tensors["model.embed_tokens.weight"]
    size = embedding_VD.shape[1]
    tensors["model.embed_tokens.weight"] = embedding_VD * embedding_VD.square().mean(1, keepdim=True).rsqrt()
    tensors[f"{mtp}enorm.weight"] = torch.ones(size)
    tensors[f"{mtp}eh_proj.weight"] = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    tensors[f"{mtp}shared_head.norm.weight"] = tensors["model.norm.weight"]
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def take_last_layer(directory: Path, num_layers: int, own: dict[str, Tensor] | None = None) -> None:
    """Makes the last layer of a checkpoint the one within an MTP layer, with these other tensors.

    Args:
        num_layers: of the model without that layer.
    """
    tensors = load_file(directory / "model.safetensors")
    prefix = f"model.layers.{num_layers}."
    assert any(each.startswith(prefix) for each in tensors)
    embedding = tensors["model.embed_tokens.weight"]
    tensors |= {prefix + each: tensor for each, tensor in (own or _own_tensors(embedding.shape[1])).items()}
    tensors[f"{prefix}embed_tokens.weight"] = embedding
    tensors[f"{prefix}shared_head.head.weight"] = tensors.get("lm_head.weight", embedding)
    tensors = {each: tensor.clone() for each, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    if types := config.get("mlp_layer_types"):
        config["mlp_layer_types"] = types[:num_layers]
    path.write_text(json.dumps(config))


def _own_tensors(size: int) -> dict[str, Tensor]:
    """The tensors of an MTP layer besides those of the layer within."""
    generator = torch.Generator().manual_seed(5)
    own = {f"{norm}.weight": torch.empty(size).uniform_(0.5, 1.5, generator=generator) for norm in _OWN}
    return own | {"eh_proj.weight": torch.empty(size, 2 * size).normal_(std=0.2, generator=generator)}
