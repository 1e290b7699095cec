"""Which recurrent states a step reads and writes, for every recurrent layer alike."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StateRows:
    """The requests of a step: first its decodes, one token each, then its prompts.

    Decodes and prompts lie one after the other among the tokens: token i of the first N is that of decode i, if
    `decode_lens_N[i]` is above 0. The tensors have fixed sizes where a CUDA graph reads them, so they may have rows of
    padding, which read and write nothing.

    Attributes:
        decode_slots_N: int32, slot of each decode; -1 for a row that is none, and in steps that only compile or
            capture: such a row reads and writes nothing, whatever its length.
        decode_lens_N: int32, tokens of the sequence, this one included; 1: the state before is zero, whatever the slot
            holds; 0 for a row that is no decode.
        prompt_slots_P: int32, slot of each prompt; -1 as above. P may be 0.
        prompt_starts_P1: [P + 1] int32, where each prompt's tokens start.
        prompt_context_P: int32, tokens of the prompt that are in the state already; 0: the state before is zero,
            whatever the slot holds.
        max_prompt_tokens: an upper bound of a prompt's new tokens.
    """

    decode_slots_N: Tensor
    decode_lens_N: Tensor
    prompt_slots_P: Tensor
    prompt_starts_P1: Tensor
    prompt_context_P: Tensor
    max_prompt_tokens: int
