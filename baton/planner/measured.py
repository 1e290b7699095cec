"""Step costs that nodes measured themselves at their start, and times of hosts from pages in bench/results; for plans,
tests, benchmarks and pages. Pure."""

from baton.core.costs import StepCosts
from baton.planner.host import HostTimes

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

# Where nodes and gateways of that model served, each on a host of two H200s.
SERVED_HOST = HostTimes(
    hop_s=7.3e-3,  # served.md: 31.3 ms for 1,024 tokens alone, less the 24.0 ms of the step
    remote_s=4.6e-3,  # served.md: first tokens of strict chat at 40 a second come so much later than the rest explains
    hand_over_s=3.4e-3,  # exposed_gpu.md: the second token comes 4.4 ms late, less 1 ms of `link_latency_s`
    lead_s=2.5e-3,  # served.md: late steps were queued 1.6 to 3.4 ms after the device had run dry
    mixed_s=0.5e-3,  # prompt_steps.md: 0.1 and 1.0 ms more than the step costs say
    later_token_s=2e-6,  # exposed_gpu.md and engine.md: 1.6 us in chunks of 2048 tokens, 5.6 us in chunks of 1024
    row_s=55e-6,  # served.md: strict chat at 70 a second has a TPOT of 7.2 ms
    stall_share=0.0176,  # served.md: 50 of 2,843 steps
    stall_s=1e-3,  # served.md: the ends of two steps of 5.6 ms were over 7 ms apart
    token_s=50.8e-6,  # http_door.md: HTTP, completions
)
