"""Reads config.json of EAGLE-3 heads, in the form of their authors and SpecForge and in that of speculators.

A head is Llama's layer, whatever family it drafts for. It must fit the model: hidden size, vocabulary, and layers whose
inputs it reads.
"""

from dataclasses import replace
from pathlib import Path

from baton.core.errors import ConfigError
from baton.models.checkpoint.checkpoint import StoredTensor, read_checkpoint
from baton.models.config.fields import Fields, Integers, Layers, Size, Table, Texts
from baton.models.config.file import ConfigFile
from baton.models.config.model_config import EagleConfig, ModelConfig
from baton.models.families.dense.llama_config import LlamaLikeFields

# SafeAILab's and SpecForge's name, vLLM's, and those of speculators.
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_LAYER_PREFIX = "midlayer."
# Speculators' and vLLM's names of the same layer.
_LAYER_PREFIXES = ("model.layers.0.", "layers.0.", "model.midlayer.")
# The inverse of d2t, for training, and angles, which we compute.
_NOT_READ = ("t2d", "midlayer.self_attn.rotary_emb.inv_freq")
_NUM_READS = 3


class _Names(Fields):
    architectures: Texts = ()


class _HeadFields(LlamaLikeFields):
    num_hidden_layers: Layers = 1
    attention_bias: bool = False


class _EagleFields(Fields):
    """The fields around the layer's.

    Attributes:
        eagle_aux_hidden_state_layer_ids: layers whose inputs the head reads, as vLLM counts them.
        eagle_config: has a field of the same name with layers whose outputs it reads, as SpecForge and ModelOpt count.
    """

    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    norm_before_residual: bool | None = None
    eagle_aux_hidden_state_layer_ids: Integers = ()
    eagle_config: Table | None = None


class _NestedFields(Fields):
    eagle_aux_hidden_state_layer_ids: Integers = ()
    use_aux_hidden_state: bool = True


def read_head(directory: Path, config: ModelConfig, *, has_weights: bool = True) -> EagleConfig:
    """Reads the configuration of the EAGLE-3 head in `directory`.

    Args:
        config: the model that the head drafts for.
        has_weights: the directory has tensors besides its config.json.

    Raises:
        ConfigError: a file cannot be read, a field is missing or wrong, or head and model do not fit.
    """
    try:
        file = ConfigFile.read(directory / "config.json")
        names = _Names.read(file).architectures
        if len(names) != 1 or names[0] not in ARCHITECTURES:
            cure = "give the directory of an EAGLE-3 head; it has one layer of Llama's form, whatever the model is"
            raise file.refuse("architectures", *ARCHITECTURES, cure=cure)
        fields = _EagleFields.read(file)
        layer = _layer(file, config)
        stored = head_tensors(directory) if has_weights else {}
    except ConfigError as error:
        raise ConfigError(
            f"draft_head: {error.message}",
            field="draft_head",
            value=str(directory),
            allowed=error.allowed,
            cure=error.cure,
        ) from error
    sizes = {
        "hidden_size": (layer.hidden_size, config.hidden_size),
        "vocab_size": (layer.vocab_size, config.vocab_size),
    }
    if fields.target_hidden_size is not None:
        sizes["target_hidden_size"] = fields.target_hidden_size, config.hidden_size
    for name, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise _unfit(directory, f"its {name} is {ours}, and the model has {theirs}")
    of_speculators = names[0] in ARCHITECTURES[2:]
    norm_first = fields.norm_before_residual
    draft_vocab_size = fields.draft_vocab_size or config.vocab_size
    maps_tokens = "d2t" in stored if has_weights else draft_vocab_size != config.vocab_size
    if draft_vocab_size > config.vocab_size or (draft_vocab_size < config.vocab_size and not maps_tokens):
        raise _unfit(
            directory, f"it has {draft_vocab_size} tokens of the model's {config.vocab_size}, and no tensor d2t"
        )
    return EagleConfig(
        layer,
        draft_vocab_size,
        _reads(directory, file, fields, config.num_layers),
        norm_before_residual=of_speculators if norm_first is None else norm_first,
        own_embedding="embed_tokens.weight" in stored,
        maps_tokens=maps_tokens,
    )


def head_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a head that are read, by the names that its authors gave them."""
    stored: dict[str, StoredTensor] = {}
    for name, tensor in read_checkpoint(directory).items():
        for prefix in _LAYER_PREFIXES:
            if name.startswith(prefix):
                name = _LAYER_PREFIX + name.removeprefix(prefix)
        stored[name.removeprefix("model.")] = tensor
    return {name: tensor for name, tensor in stored.items() if name not in _NOT_READ}


def _layer(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """Returns the head's layer as a model of one layer. Its context is the model's: the file has the length of the
    sequences on which the head was trained, which counts only where its rotary embedding is scaled by it."""
    table = file
    if file.raw("transformer_layer_config") is not None:
        table = file.table("transformer_layer_config")
    known: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "dtype": config.dtype,
        "eos_token_id": [0],
        "tie_word_embeddings": False,
    }
    if table.raw("max_position_embeddings") is None:
        known["max_position_embeddings"] = config.max_context_tokens
    fields = _HeadFields.read(table.with_values(known))
    if fields.num_hidden_layers != 1:
        raise fields.refuse("num_hidden_layers", "1")
    bias = fields.attention_bias
    layer = fields.llama_like(fields.gqa(qkv_bias=bias, output_bias=bias))
    if layer.quantization is not None:
        raise fields.refuse("quantization_config", "null", cure="give a head whose weights are not quantized")
    return replace(layer, max_position_embeddings=config.max_context_tokens)


def _reads(directory: Path, file: ConfigFile, fields: _EagleFields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs the head reads."""
    nested = _NestedFields.read(file.table("eagle_config"))
    if not nested.use_aux_hidden_state:
        raise _unfit(directory, "it reads the model's last hidden state only (use_aux_hidden_state is false)")
    reads = fields.eagle_aux_hidden_state_layer_ids
    reads = reads or tuple(index + 1 for index in nested.eagle_aux_hidden_state_layer_ids)
    reads = reads or (2, num_layers // 2, num_layers - 3)
    if len(reads) != _NUM_READS or list(reads) != sorted(set(reads)) or not 0 <= reads[0] <= reads[-1] < num_layers:
        raise _unfit(
            directory, f"it reads the inputs of the layers {', '.join(map(str, reads))}, and the model has {num_layers}"
        )
    return reads


def _unfit(directory: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"the EAGLE-3 head in {directory} does not fit the model: {problem}",
        field="draft_head",
        value=str(directory),
        allowed=("a head that was trained for this model",),
        cure="give the head of this model, or leave out --draft-head",
    )
