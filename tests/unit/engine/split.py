"""A model's first greedy and drawn tokens, whole or as one of several ranks."""

from dataclasses import dataclass
from pathlib import Path

from baton.core.sampling import ResolvedSampling
from baton.core.types import TokenOutput
from baton.engine.batch import Batch, BatchRow, ScoreRow
from baton.engine.build import build_runner
from baton.engine.request import int_array
from baton.engine.sampling.row import SampleRow
from baton.kvcache.spec import KVCacheSpec
from baton.models.layers.parallel import SINGLE, TensorParallel
from baton.settings.node_config import NodeSettings

_PROMPTS = ((5, 17, 300, 41, 7, 9, 1100, 23, 64, 2), (811, 12, 3000, 4, 4, 90))
_BLOCKS = 2  # of each request
_NUM_TOKENS = 6


@dataclass(frozen=True)
class Generated:
    """The results of one rank."""

    tokens: list[list[int]]
    prompt_logprobs: list[float]
    num_blocks: int
    max_batch_tokens: int
    spec: KVCacheSpec
    model_spec: KVCacheSpec
    kv_heads: range


def generate(parallel: TensorParallel, directories: list[Path]) -> list[Generated]:
    """The results for each model. Ranks have caches of different sizes."""
    return [_generate(parallel, directory) for directory in directories]


def generate_alone(directories: list[Path]) -> list[Generated]:
    return generate(SINGLE, directories)


def _generate(parallel: TensorParallel, directory: Path) -> Generated:
    built = build_runner(
        NodeSettings(
            model=directory, num_blocks=32 + parallel.rank, max_batch_tokens=256 - parallel.rank, device="cpu"
        ),
        parallel=parallel,
    )
    tokens = []
    for params in (ResolvedSampling(temperature=0.0), ResolvedSampling(temperature=0.9, top_p=0.9, seed=7)):
        for step in range(_NUM_TOKENS):
            rows = tuple(_row(index, step, params, built.config.vocab_size) for index in range(len(_PROMPTS)))
            outputs = built.runner.run(Batch(step, rows))
            tokens.append([output.token_id for output in outputs if isinstance(output, TokenOutput)])
    prompts = tuple(_row(index, 0, params, built.config.vocab_size) for index in range(len(_PROMPTS)))
    scores = tuple((index, ScoreRow(row.token_ids[1:], 3)) for index, row in enumerate(prompts))
    launched = built.runner.launch(Batch(_NUM_TOKENS, prompts, scores=scores))
    launched.wait()
    logprobs = [each.logprob for row in launched.scores.values() for each in row if each.logprob is not None]
    spec, facts = built.cache.spec, built.runner.facts
    return Generated(
        tokens, logprobs, facts.num_blocks, built.limits.max_batch_tokens, spec, built.model_spec, built.kv_heads
    )


def _row(index: int, step: int, params: ResolvedSampling, vocab_size: int) -> BatchRow:
    blocks = int_array(list(range(index * _BLOCKS, (index + 1) * _BLOCKS)))
    sample = SampleRow(params, step, (), int_array(), 0)
    if step == 0:
        prompt = int_array([token_id % vocab_size for token_id in _PROMPTS[index]])
        return BatchRow(str(index), prompt, 0, blocks, sample)
    return BatchRow(str(index), int_array([0]), len(_PROMPTS[index]) + step - 1, blocks, sample, token_source=index)
