"""Counts the parameters of a model's layers, from its configuration alone. Pure.

Biases, norms and filters of convolutions are left out: together they are under a hundredth of a published model.
"""

from collections.abc import Iterable

from baton.models.config.model_config import GQAConfig, MLAConfig, ModelConfig
from baton.models.families.dense.gemma3n_config import Gemma3nSwitches
from baton.models.families.dense.gemma4_config import Gemma4Switches
from baton.models.families.dense.layer_norm_config import LayerNormSwitches
from baton.models.families.dense.llama_switches import LlamaSwitches
from baton.models.families.hybrid.delta_config import DeltaSwitches
from baton.models.families.hybrid.lfm2_config import Lfm2Switches
from baton.models.families.hybrid.mamba_config import MambaSwitches

# Their MLPs have two projections and no gate, which their switches do not show.
_UNGATED = ("BloomForCausalLM", "FalconForCausalLM")


def layers_with_kv(config: ModelConfig) -> list[int]:
    """The layers that attend."""
    recurrent = config.recurrent
    return [index for index in range(config.num_layers) if recurrent is None or recurrent.kv_layers[index]]


def attention(config: ModelConfig) -> int:
    """Parameters of all layers' projections to and from attention."""
    match config.attention:
        case GQAConfig() as gqa:
            return sum(_grouped(config, gqa, index) for index in layers_with_kv(config))
        case mla:
            return len(layers_with_kv(config)) * config.attentions_per_layer * _latent(config, mla)


def latents(config: ModelConfig) -> int:
    """The part of `attention` that every rank holds: the projections to latents."""
    mla = config.attention
    if not isinstance(mla, MLAConfig):
        return 0
    width = mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
    return len(layers_with_kv(config)) * config.attentions_per_layer * config.hidden_size * width


def indexers(config: ModelConfig) -> int:
    """Parameters of the indexers of sparse attention, which every rank holds."""
    mla = config.attention
    if not isinstance(mla, MLAConfig) or mla.index is None:
        return 0
    index, rank = mla.index, mla.q_lora_rank or config.hidden_size
    queries, keys = rank * index.num_heads * index.head_dim, config.hidden_size * index.head_dim
    return sum(index.layers) * (queries + keys + config.hidden_size * index.num_heads)


def mixers(config: ModelConfig) -> int:
    """Parameters of all recurrent layers."""
    recurrent, hidden = config.recurrent, config.hidden_size
    if recurrent is None:
        return 0
    heads = recurrent.num_heads
    match config.switches:
        case MambaSwitches() as mamba:
            inner, shared = heads * mamba.head_dim, recurrent.num_groups * mamba.state_size
            each = hidden * (3 * inner + 2 * shared + heads)
        case DeltaSwitches() as delta if config.architecture == "KimiLinearForCausalLM":
            size, rank = heads * delta.key_dim, delta.key_dim
            each = hidden * (4 * size + 2 * rank + heads) + 2 * rank * size
        case DeltaSwitches() as delta:
            values = heads * delta.values_per_key
            each = hidden * (2 * heads * delta.key_dim + 3 * values * delta.value_dim + 2 * values)
        case Lfm2Switches():
            each = 4 * hidden * hidden
        case others:
            raise AssertionError(f"recurrent layers of {others!r}")
    return recurrent.num_layers * each


def projections(config: ModelConfig) -> int:
    """The number of an MLP's projections: two, or three with a gate."""
    match config.switches:
        case LayerNormSwitches():
            return 2
        case LlamaSwitches(squared_relu_mlp=True) | LlamaSwitches(xielu_mlp=True):
            return 2
        case MambaSwitches() as mamba if mamba.kinds:
            return 2
    return 2 if config.architecture in _UNGATED else 3


def dense_mlps(config: ModelConfig) -> int:
    """Parameters of the MLPs that every token uses, without shared experts."""
    return projections(config) * config.hidden_size * sum(_mlp_sizes(config))


def expert_size(config: ModelConfig) -> int:
    """Channels of a routed expert's input."""
    switches = config.switches
    return switches.latent_size if isinstance(switches, MambaSwitches) and switches.latent_size else config.hidden_size


def family_extras(config: ModelConfig) -> int:
    """Parameters of the linear layers that only some families have, besides attention and MLP."""
    layers, hidden, found = config.num_layers, config.hidden_size, 0
    match config.switches:
        case Gemma3nSwitches() as gemma:
            modes = gemma.streams * (hidden + gemma.streams + gemma.streams**2)
            found = layers * (2 * hidden * gemma.laurel_rank + modes) + 2 * (gemma.streams - 1) * hidden * hidden
        case LayerNormSwitches(embedding_size=int(size)):
            found = 2 * hidden * size
        case MambaSwitches(latent_size=latent) if config.moe is not None:
            found = 2 * sum(config.moe.layers) * hidden * latent
    match config.switches:
        case Gemma3nSwitches(input_size=size) | Gemma4Switches(input_size=size):
            found += 3 * layers * hidden * size
    return found


def tables(config: ModelConfig) -> int:
    """Parameters of embeddings other than the tokens' own; every rank holds them."""
    match config.switches:
        case Gemma3nSwitches() | Gemma4Switches() as gemma:
            return gemma.input_vocab_size * config.num_layers * gemma.input_size
        case LayerNormSwitches(position_offset=int(offset)):
            return (config.max_position_embeddings + offset) * config.hidden_size
    return 0


def embedding_size(config: ModelConfig) -> int:
    """Channels of the embedding of tokens, and of the head's inputs."""
    match config.switches:
        case LayerNormSwitches(embedding_size=int(size)):
            return size
    return config.hidden_size


def _grouped(config: ModelConfig, gqa: GQAConfig, layer_index: int) -> int:
    kv_heads, head_dim = gqa.heads_of(layer_index)
    switches, slides = config.switches, gqa.sliding_windows[layer_index] is not None
    queries, value_dim = gqa.num_heads * head_dim, gqa.v_head_dim or head_dim
    outputs = gqa.num_heads * value_dim
    if layer_index >= gqa.num_kv_layers:
        kept = 0
    elif isinstance(switches, Gemma4Switches) and switches.values_are_keys and not slides:
        kept = head_dim
    else:
        kept = head_dim + value_dim
    return config.hidden_size * (queries * (2 if gqa.output_gate else 1) + outputs + kv_heads * kept)


def _latent(config: ModelConfig, mla: MLAConfig) -> int:
    hidden, heads = config.hidden_size, mla.num_heads
    query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    rank = mla.q_lora_rank
    queries = hidden * heads * query if rank is None else (hidden + heads * query) * rank
    latent = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    return (
        queries
        + latent
        + heads * mla.v_head_dim * hidden
        + mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    )


def _mlp_sizes(config: ModelConfig) -> Iterable[int]:
    """The size of each dense MLP."""
    moe, switches = config.moe, config.switches
    for index in range(config.num_layers):
        if config.shortcut_experts:
            yield from (config.intermediate_size,) * config.attentions_per_layer
        elif isinstance(switches, MambaSwitches) and switches.kinds:
            yield config.intermediate_size if switches.kinds[index] == "mlp" else 0
        elif moe is None or not moe.layers[index]:
            yield config.mlp_size(index)
