"""Describes usage and receipt of an answer for a person. Pure."""

from collections.abc import Iterator

from baton.cli.sizes import mib, milliseconds
from baton.core.types import Receipt, Usage
from baton.rpc.revisions import describe_revision


def receipt_lines(usage: Usage, receipt: Receipt) -> Iterator[tuple[str, str]]:
    """Yields a name and a sentence for each part of the receipt that applies to the answer."""
    cached = f", {usage.cached_tokens} of them cached" if usage.cached_tokens else ""
    loaded = max(receipt.prefill_loaded, receipt.decode_loaded, key=lambda each: each.total)
    sources = {"host memory": loaded.host, "files": loaded.file, "a shared store": loaded.store}
    sources["other nodes"] = loaded.peer
    total = max(receipt.prefill_loaded_tokens, receipt.decode_loaded_tokens)
    if total and not loaded.total:  # a node of an earlier version does not say from where
        cached += f", {total} of these read from outside of the cache"
    if read := ", ".join(f"{tokens} from {source}" for source, tokens in sources.items() if tokens):
        cached += f", of these read {read}"
    yield "path", f"{receipt.path}: {receipt.why}"
    yield "prompt", f"{usage.prompt_tokens} tokens{cached}, prefilled on {receipt.prefill_node or receipt.decode_node}"
    yield "output", f"{usage.completion_tokens} tokens, decoded on {receipt.decode_node}"
    if receipt.bytes_sent:
        yield (
            "KV moved",
            (
                f"{mib(receipt.bytes_sent)} of {receipt.prompt_tokens_sent} tokens, {receipt.prefill_node} to "
                f"{receipt.decode_node}, in {receipt.segments} segment(s) over {receipt.transport}"
            ),
        )
        yield "transfer", f"complete {milliseconds(receipt.transfer_s)} after the first token"
    else:
        yield "KV moved", "nothing: one node served the whole request"
    if receipt.drafted_tokens:
        yield "drafts", f"{receipt.accepted_tokens} of {receipt.drafted_tokens} draft tokens accepted"
    if receipt.layer_groups > 1:
        yield "overlap", f"each chunk was sent in {receipt.layer_groups} groups of layers, while later layers computed"
    if receipt.kv_converted:
        yield "converted", receipt.kv_converted
    yield "times", ", ".join(
        f"{name} {milliseconds(seconds)}"
        for name, seconds in (
            ("queue", receipt.queue_s), ("prefill", receipt.prefill_s), ("first token", receipt.ttft_s),
            ("whole answer", receipt.total_s),
        )
    )  # fmt: skip
    if speed := tokens_per_s(usage, receipt):
        yield "speed", f"{speed:.0f} tokens/s after the first token"
    if receipt.attempts > 1:
        yield "attempts", str(receipt.attempts)
    if receipt.revision:
        yield "weights", describe_revision(receipt.revision, receipt.revision_name)
    versions = {version for version in (receipt.prefill_version, receipt.decode_version) if version}
    if versions:
        yield "Baton", " and ".join(sorted(versions))
    yield "request", receipt.request_id


def tokens_per_s(usage: Usage, receipt: Receipt) -> float | None:
    """Speed of the output after its first token. Returns None if there was no further token."""
    decode_s = receipt.total_s - receipt.ttft_s
    later = usage.completion_tokens - 1
    return later / decode_s if later > 0 and decode_s > 0 else None
