"""What the demo prints at its end: where each request's time went, who served it, what NIXL moved. All fits 80 columns."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from proto.baton.v1 import generation_pb2

LEGEND = """\
queue: received until prefill began. transfer: reading the pages; exposed: the
part of it that the request waited for, the rest was hidden behind prefill.
decode: ready until the last token. TTFT: received until the first token was
sent. TPOT: between tokens after it. UCX transport: cma/memory = straight from
one process's memory to another's, tcp/... = over sockets.
Each text was prefilled in one process, handed over as latent KV through NIXL,
and decoded in another."""


def _table(title: str, numbers: Sequence[str], names: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def timeline_table(ends: Mapping[str, generation_pb2.Finished]) -> Table:
    """Where each request's time went."""
    table = _table("where each request's time went (ms)", ("req", "queue", "prefill", "transfer", "exposed", "decode", "TTFT", "TPOT"))
    for name, end in ends.items():
        line, moved = end.timeline, end.timeline.transfer
        spans = (line.queue_us, line.prefill_us, moved.read_us, moved.exposed_us, line.decode_us, line.ttft_us, line.tpot_us)
        table.add_row(name, *(f"{span / 1000:.1f}" for span in spans))
    return table


def rank_table(ends: Mapping[str, generation_pb2.Finished]) -> Table:
    """Tokens, and who served them."""
    table = _table("tokens, and who served them", ("req", "prompt", "cached", "output"), ("prefill rank", "decode rank"))
    for name, end in ends.items():
        usage = end.usage
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        table.add_row(name, *map(str, tokens), end.timeline.prefill_rank, end.timeline.decode_rank)
    return table


def transfer_table(ends: Mapping[str, generation_pb2.Finished]) -> Table:
    """What NIXL moved for each request."""
    table = _table("what NIXL moved from prefill to decode", ("req", "pages", "already there", "bytes", "GB/s"), ("UCX transport",))
    for name, end in ends.items():
        moved = end.timeline.transfer
        rate = moved.num_bytes / moved.read_us / 1000 if moved.read_us else 0.0
        table.add_row(name, str(moved.num_pages), str(moved.num_cached_pages), f"{moved.num_bytes:,}", f"{rate:.2f}", moved.transport)
    return table
