"""Numbers that nodes choose drafts by. `baton plan` simulates nodes with them. Pure."""

# Most drafts for one request and step.
MOST_DRAFTS = 16
# Drafts must bring so many times the tokens a second of the plain step, because costs and chances are predicted to
# within a few percent. With 1.03, two of twelve loads on an H200 were 2.7 % slower with drafts than without.
LEAST_GAIN = 1.08
# All requests of a step wait for the drafts of each. A request may come later by so many plain steps because of the
# others' drafts, and by so many more for each of its tokens; and further by as many as its own drafts have saved, up
# to the most. So a request for which nothing can be drafted loses 2 % of the time of 200 tokens. One with a TPOT waits
# as long as that allows, and for what its own drafts have saved.
FIRST_CREDIT, REGAINED_CREDIT, MOST_CREDIT = 2.0, 0.01, 12.0
# Of its credit, a request waits for so many plain steps in one step at most.
CREDIT_OF_STEP = 4.0
# For how long a device waits for the host because of drafts, until a node has measured it, as (rows, seconds).
# Estimated for an H200 and Llama-3.1-8B from times per token with 1, 8 and 32 requests: the number of steps comes from
# a replay of the same drafts, and their time on the device from the cost model. See bench/results/drafts_gpu.md.
ASSUMED_WAITS = ((1, 0.0023), (256, 0.0082))


def assumed_wait_s(rows: int) -> float:
    """The assumed wait for a step with drafts.

    Args:
        rows: decodes and drafts of the step.
    """
    (few, few_s), (many, many_s) = ASSUMED_WAITS
    return few_s + (many_s - few_s) * (rows - few) / (many - few)
