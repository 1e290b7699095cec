"""`python -m tests.gpu.start_without_memory`: a node of two GPUs, one of which has no memory left for its weights.

Another process holds that card's memory. The node, or the cluster of its `baton up`, has to end with the reason, and
all its processes and their memory with it. Needs both cards alone, so it is no test of pytest's.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from baton.settings.config import DEMO_MODELS, tokenizer_file

# The card keeps so much: enough for CUDA, NCCL and kernels, not for a rank's 10 GiB of weights.
LEFT_BYTES = 4 << 30
SLACK_BYTES = 256 << 20
GONE_S = 5.0
START_S = 180.0
REASON = "the GPU has no memory left for the weights"

BALLAST = """
import sys, torch
torch.cuda.set_device(int(sys.argv[1]))
held = torch.empty(torch.cuda.mem_get_info()[0] - int(sys.argv[2]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
FREE = "import torch; print(*(torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)))"

FLAGS = {
    "load-format": "dummy",
    "tensor-parallel-size": 2,
    "expert-parallel": "on",
    "attention-data-parallel": "on",
    "num-blocks": 1024,
}
MODEL = {"hidden_size": 2048, "moe_intermediate_size": 2816, "n_routed_experts": 64, "num_hidden_layers": 10}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="baton-memory-") as folder:
        model = _make_model(Path(folder))
        node = [sys.executable, "-m", "decode_node", "--model", str(model), "--listen", "127.0.0.1:0"]
        node += [part for name, value in FLAGS.items() for part in (f"--{name}", str(value))]
        baton = [sys.executable, "-c", "from baton.cli import main; main()"]
        up = [*baton, "up", "--prefill-nodes", "0", "--model", str(model), "--tensor-parallel-size", "2", "--port", "0"]
        variables = {f"BATON_{name.upper().replace('-', '_')}": str(value) for name, value in FLAGS.items()}
        for rank in (1, 0):
            _check(f"a node, rank {rank}", node, rank, {})
            _check(f"baton up, rank {rank}", up, rank, variables)
    print("all ended as they should")


def _make_model(folder: Path) -> Path:
    """The demo model with experts of some size; weights are drawn."""
    demo = DEMO_MODELS / "deepseek"
    for path in demo.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "tokenizer.json").write_bytes(tokenizer_file(demo).read_bytes())
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | MODEL))
    return folder


def _check(what: str, command: list[str], rank: int, variables: dict[str, str]) -> None:
    with _ballast(rank):
        free_before = _free_bytes()
        with tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **variables},
                start_new_session=True,
            )
            family, seconds = _until_gone(psutil.Process(process.pid), stderr.fileno())
            code = process.wait(GONE_S)
            stderr.seek(0)
            lines = stderr.read().splitlines()
        print(f"{what}: exit code {code}, {len(family)} processes, all gone {seconds:.1f} s after the reason")
        print(*(f"    {line}" for line in lines[-3:]), sep="\n", flush=True)
        assert code == 1
        assert sum(REASON in line for line in lines) == 1, lines
        for gpu, (before, after) in enumerate(zip(free_before, _free_bytes(), strict=True)):
            assert after >= before - SLACK_BYTES, f"GPU {gpu} had {before} bytes free, and has {after}"


def _until_gone(process: psutil.Process, stderr: int) -> tuple[set[psutil.Process], float]:
    """All processes that there were, and how long after the reason was logged the last of them was gone."""
    family, deadline, logged = {process}, time.monotonic() + START_S, 0.0
    while alive := [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        for each in alive:
            family |= _children(each)
        if not logged and REASON.encode() in os.pread(stderr, 1 << 20, 0):
            logged = time.monotonic()
            deadline = logged + GONE_S
        if time.monotonic() > deadline:
            for each in alive:
                each.kill()
            raise AssertionError(f"still there: {alive}" if logged else "no reason was logged")
        time.sleep(0.02)
    return family, time.monotonic() - logged


def _children(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


@contextmanager
def _ballast(gpu: int) -> Iterator[None]:
    command = [sys.executable, "-c", BALLAST, str(gpu), str(LEFT_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


def _free_bytes() -> list[int]:
    done = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=True, timeout=START_S)
    return [int(each) for each in done.stdout.split()]


if __name__ == "__main__":
    main()
