"""Steps leave snapshots of recurrent states within prompts, whether or not a step is padded as captured ones are. The
kernels' own tests show that a cut there changes no bit; attention's last bits depend on cuts."""

import pytest
import torch

from baton.engine.batch import Batch, BatchRow
from baton.engine.build import BuiltRunner, build_runner
from baton.engine.device.graphs import GraphSettings
from baton.engine.request import int_array
from baton.engine.sampling.row import GREEDY_ROW
from baton.settings.node_config import NodeSettings
from tests.unit.engine.driver import runner_of
from tests.unit.engine.tiny import prompt_of
from tests.unit.models.tiny import save_tiny

FAMILIES = ("lfm2", "qwen3-next", "kimi-linear", "granite-hybrid", "nemotron-h", "falcon-h1")
GRAPHS = GraphSettings(max_requests=8, max_context_tokens=256, max_tokens=256)
PROMPT = prompt_of(150)


@pytest.fixture(scope="module", params=FAMILIES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    directory = tmp_path_factory.mktemp("model")
    save_tiny(request.param, directory)
    return build_runner(
        NodeSettings(model=directory, device="cpu", num_blocks=128, block_size=4, dtype="float32", threads=1)
    )


def prompt_row(start: int, stop: int, *, slot: int, snapshots: tuple[tuple[int, int], ...] = ()) -> BatchRow:
    """Tokens of the prompt, in blocks of its slot's own."""
    blocks = int_array([1 + slot * 40 + block for block in range(-(-stop // 4))])
    return BatchRow("", int_array(PROMPT[start:stop]), start, blocks, None, state_slot=slot, snapshots=snapshots)


@pytest.mark.parametrize("graphs", [None, GRAPHS], ids=["plain", "padded"])
@pytest.mark.parametrize("start", [0, 30])
def test_snapshots_within_a_prompt_equal_the_states_of_a_prompt_that_is_cut_there(
    built: BuiltRunner, graphs: GraphSettings | None, start: int
) -> None:
    """Next to a decode; the step begins with the prompt, or after its first tokens."""
    runner = runner_of(built, graphs=graphs)
    assert runner._cache.state is not None
    runner.prepare()
    states_LPSHC = runner._cache.state.view
    states_LPSHC.fill_(float("nan"))
    decode = BatchRow("", int_array([3]), 0, int_array([0]), GREEDY_ROW, state_slot=0)

    def run(*rows: BatchRow) -> None:
        runner.run(Batch(1, rows))

    for slot in (1, 2) if start else ():
        run(prompt_row(0, start, slot=slot))
    run(decode, prompt_row(start, 150, slot=1, snapshots=((64 - start, 3), (128 - start, 4))))
    kept = states_LPSHC[:, :, 3:5].clone()
    run(prompt_row(start, 64, slot=2))
    torch.testing.assert_close(kept[:, :, 0], states_LPSHC[:, :, 2], rtol=1e-4, atol=1e-5)
    run(prompt_row(64, 128, slot=2))
    torch.testing.assert_close(kept[:, :, 1], states_LPSHC[:, :, 2], rtol=1e-4, atol=1e-5)
    assert torch.equal(kept, states_LPSHC[:, :, 3:5]), "later steps have no snapshots"
    assert states_LPSHC[:, :, 5:].isnan().all(), "no other slot is written"
