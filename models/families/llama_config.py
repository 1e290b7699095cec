"""config.json of Llama, Mistral, Qwen2 and Qwen3. No torch."""

from models.config.fields import read_gqa, read_layer_types, read_model, read_model_rope, read_uniform_windows
from models.config.file import ConfigFile
from models.config.model_config import GQAConfig, ModelConfig


def read_llama(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    bias = file.flag("attention_bias")
    if "sliding_window" in file:
        raise file.refuse("sliding_window", "null", cure="this architecture always attends to all tokens")
    windows = read_uniform_windows(file, None)
    return _model(file, architecture, eos, read_gqa(file, windows=windows, qkv_bias=bias, output_bias=bias))


def read_mistral(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    windows = read_uniform_windows(file, _window(file))
    return _model(file, architecture, eos, read_gqa(file, windows=windows, qkv_bias=False, output_bias=False))


def read_qwen2(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    windows = _qwen_windows(file)
    return _model(file, architecture, eos, read_gqa(file, windows=windows, qkv_bias=True, output_bias=False))


def read_qwen3(file: ConfigFile, architecture: str, eos: tuple[int, ...]) -> ModelConfig:
    bias = file.flag("attention_bias")
    attention = read_gqa(file, windows=_qwen_windows(file), qkv_bias=bias, output_bias=bias, qk_norm=True)
    return _model(file, architecture, eos, attention)


def _model(file: ConfigFile, architecture: str, eos: tuple[int, ...], attention: GQAConfig) -> ModelConfig:
    rope = read_model_rope(file, dim=attention.head_dim)
    return read_model(file, architecture, eos, attention=attention, rope=rope)


def _window(file: ConfigFile) -> int | None:
    """Null means full attention; a file without the field means the 4096 that these families began with."""
    return file.optional_integer("sliding_window") if file.mentions("sliding_window") else 4096


def _qwen_windows(file: ConfigFile) -> tuple[int | None, ...]:
    """Layer by layer as `layer_types` says; without it, sliding from layer `max_window_layers` on."""
    num_layers = file.integer("num_hidden_layers")
    window = _window(file) if file.flag("use_sliding_window") else None
    types = read_layer_types(file, "full_attention", "sliding_attention")
    if not types:
        full_layers = file.integer("max_window_layers", 28, minimum=0)
        return tuple(None if index < full_layers else window for index in range(num_layers))
    if window is None and "sliding_attention" in types:
        raise file.refuse("use_sliding_window", "true", cure="layer_types has sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
