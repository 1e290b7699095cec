"""`baton demo` starts a local cluster, sends one prompt through it, and shows prompt, answer and receipt."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.generate import print_answer
from baton.cli.local_cluster import ClusterOptions, local_cluster
from baton.cli.receipt import receipt_lines
from baton.cli.signals import Stopped, stop_on_signals
from baton.core.errors import BatonError
from baton.core.limits import TOKENS_MAX
from baton.core.logs import write_line
from baton.core.sampling import SamplingParams
from baton.settings.config import DEMO_MODELS, is_demo_model
from baton.settings.model_source import installed_model

# Both are long enough that a prefill node computes them.
DEMO_PROMPT = (
    "Write the given bytes to the file, and return the number of bytes written, which is always the length of the "
    "bytes. The file must be open for writing. If the file is not open, an error is raised. The method"
)
REAL_PROMPT = (
    "Water is a liquid at room temperature. When it is cooled below zero degrees Celsius, it freezes and becomes ice, "
    "which is lighter than water, so that it floats on lakes in winter. When water is heated to one hundred degrees "
    "Celsius, it"
)


def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model directory, GGUF file, or name on the Hugging Face hub. Default: smollm2 if its package is "
            "installed, else a small bundled model that continues texts like Python's documentation."
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue. Default: a prompt long enough to be handed over.", metavar="PROMPT")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, max=TOKENS_MAX, help="Most tokens to generate.")] = 80,
) -> None:
    """Start a cluster, send one prompt, show answer and receipt."""
    model = model or installed_model() or DEMO_MODELS / "deepseek"
    prompt = prompt or (DEMO_PROMPT if is_demo_model(model) else REAL_PROMPT)
    options = ClusterOptions(model=model, log_level="warning")
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    try:
        with stop_on_signals(), local_cluster(options) as cluster:
            print(f"\nPrompt\n\n{prompt}\n\nAnswer\n", flush=True)
            finished = asyncio.run(print_answer(cluster.gateway.address, prompt, params))
            print("\nReceipt\n")
            for name, value in receipt_lines(finished.usage, finished.receipt):
                print(f"  {name:<14} {value}")
            print(flush=True)
    except Stopped:
        write_line("baton: stopped")
        raise typer.Exit(130) from None
    except BatonError as error:
        write_line(f"baton: {error}")
        raise typer.Exit(1) from None
