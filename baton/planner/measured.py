"""Step costs that nodes measured themselves at their start; for tests, benchmarks and pages. Pure."""

from baton.core.costs import StepCosts

# Llama-3.1-8B in bf16 on one H200, a decode node (2026-11-23; the run of bench/results/chat_rates.md).
LLAMA_8B_H200 = StepCosts(
    points=(
        (1, 4.34e-3), (8, 4.59e-3), (32, 4.75e-3), (64, 5.25e-3), (128, 5.82e-3), (256, 7.2e-3), (512, 12.3e-3),
        (1024, 23.6e-3), (2048, 46.1e-3), (4096, 92.1e-3), (8192, 186e-3),
    ),
    key_s=2.81e-8,
    pair_s=7.4e-10,
    decode_row_s=4.1e-6,
)  # fmt: skip
