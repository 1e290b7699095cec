"""Speculation: drafts the next tokens of decoding requests, so that one step computes several of them.

A draft never changes a token, only when it comes: a step computes the draft tokens next to the known one, draws one
token after each of them as decoding would, and keeps the draws up to the first that differs from its draft token.

    allowance       work for a step that all requests share
    sequence_index  prompt lookup: where a sequence has had its last tokens before
    recent_outputs  the same for the outputs that a tenant's requests had lately
    grammar_drafts  what a grammar forces next
    acceptance      how often drafts are accepted, by what they come from
    layer_drafting  how many tokens the model's own layer drafts after a step, if it has one
    request_drafts  the drafts for one request, each with its chance, which learns from what was kept
    proposer        the same for all requests, within what one step may look up
    limits          numbers that the choice goes by
    pace_meter      what speculation makes of steps: their time, and their tokens
    depth           how many draft tokens of each request a step takes
    speculator      what the scheduler asks: which of the proposed drafts a step takes
"""
