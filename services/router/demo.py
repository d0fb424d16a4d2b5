"""`make demo`: a whole cluster on this machine, three prompts streamed at once, and where each one's time went.

    python -m services.router.demo [--config deploy/dev.toml] [--prefill 2 --decode 2] [--max-tokens 96]
"""

import asyncio
import sys
import time
from collections.abc import Sequence

import grpc.aio
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.runtime.cluster import Cluster
from services.runtime.config import argument_parser
from services.runtime.errors import SetupError
from services.runtime.serve import open_channel, run_process

PROMPTS = (
    "ROMEO.\nBut soft, what light through yonder window breaks?\n",
    "KING.\nOnce more unto the breach, dear friends, once more;\nOr close the wall up with our English dead.\n"
    "In peace there's nothing so becomes a man\nAs modest stillness and humility;\n"
    "But when the blast of war blows in our ears,\nThen imitate the action of the tiger:\n"
    "Stiffen the sinews, summon up the blood,\nDisguise fair nature with hard-favour'd rage;\n",
    "HAMLET.\nTo be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles,\n"
    "And by opposing end them. To die: to sleep;\nNo more; and by a sleep to say we end\n"
    "The heart-ache and the thousand natural shocks\nThat flesh is heir to: 'tis a consummation\n"
    "Devoutly to be wish'd. To die, to sleep.\nTo sleep: perchance to dream: ay, there's the rub;\n"
    "For in that sleep of death what dreams may come,\nWhen we have shuffled off this mortal coil,\n"
    "Must give us pause. There's the respect\nThat makes calamity of so long life.\n\nOPHELIA.\n",
)


class Story:
    """One prompt, the text so far, and how it ended."""

    def __init__(self, index: int, prompt: str) -> None:
        self.index = index
        self.prompt = prompt
        self.text = ""
        self.num_tokens = 0
        self.finished: generation_pb2.Finished | None = None
        self._printed = 0

    def panel(self) -> Panel:
        body = Text("\n".join(self.prompt.splitlines()[-3:]) + "\n", style="dim") + Text(self.text)
        return Panel(body, title=f"request {self.index}", subtitle=f"{self.num_tokens} tokens", width=52)

    def print_lines(self, console: Console, *, final: bool) -> None:
        """For output that is no terminal: whole lines as soon as they are there."""
        end = len(self.text) if final else self.text.rfind("\n") + 1
        for line in self.text[self._printed:end].splitlines():
            console.print(f"[{self.index}] {line}", markup=False, highlight=False)
        self._printed = max(end, self._printed)


async def _tell(stub: generation_pb2_grpc.GenerationStub, story: Story, max_tokens: int, console: Console) -> None:
    request = generation_pb2.GenerateRequest(text=story.prompt, max_tokens=max_tokens, temperature=0.8, seed=story.index, ignore_eos=True)
    async for reply in stub.Generate(request):
        if reply.HasField("delta"):
            story.text += reply.delta.text
            story.num_tokens += len(reply.delta.token_ids)
        elif reply.HasField("finished"):
            story.finished = reply.finished
        if not console.is_terminal:
            story.print_lines(console, final=story.finished is not None)


async def _stream_all(address: str, stories: Sequence[Story], max_tokens: int, console: Console) -> None:
    async with open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        work = asyncio.gather(*(_tell(stub, story, max_tokens, console) for story in stories))
        try:
            if not console.is_terminal:
                await work
                return
            with Live(console=console, refresh_per_second=20) as live:
                while not work.done():
                    live.update(Columns([story.panel() for story in stories]))
                    await asyncio.wait({work}, timeout=0.05)
                live.update(Columns([story.panel() for story in stories]))
            await work
        except grpc.aio.AioRpcError as error:
            raise SetupError(f"the demo's request failed with {error.code().name}: {error.details()}") from None


def _milliseconds(microseconds: int) -> str:
    return f"{microseconds / 1000:.1f}"


def timeline_table(stories: Sequence[Story]) -> Table:
    """Where each request's time went and who served it."""
    table = Table(title="timeline of each request (ms)", title_justify="left")
    for name in ("request", "prompt", "cached", "output", "queue", "prefill", "transfer", "exposed", "decode", "TTFT", "TPOT"):
        table.add_column(name, justify="right")
    table.add_column("prefill rank")
    table.add_column("decode rank")
    for story in stories:
        assert story.finished is not None, f"request {story.index} has no end"
        line, usage = story.finished.timeline, story.finished.usage
        moved = line.transfer
        cells = (line.queue_us, line.prefill_us, moved.read_us, moved.exposed_us, line.decode_us, line.ttft_us, line.tpot_us)
        table.add_row(str(story.index), str(usage.prompt_tokens), str(usage.cached_tokens), str(usage.completion_tokens),
                      *map(_milliseconds, cells), line.prefill_rank, line.decode_rank)
    return table


def transfer_table(stories: Sequence[Story]) -> Table:
    """What NIXL moved for each request."""
    table = Table(title="what NIXL moved from prefill to decode", title_justify="left")
    for name in ("request", "pages", "already there", "bytes", "GB/s"):
        table.add_column(name, justify="right")
    table.add_column("UCX transport")
    for story in stories:
        assert story.finished is not None, f"request {story.index} has no end"
        moved = story.finished.timeline.transfer
        rate = moved.num_bytes / moved.read_us / 1000 if moved.read_us else 0.0
        table.add_row(str(story.index), str(moved.num_pages), str(moved.num_cached_pages), f"{moved.num_bytes:,}", f"{rate:.2f}",
                      moved.transport)
    return table


def main() -> None:
    parser = argument_parser("Baton's demo: a cluster, three streams, a timeline")
    parser.add_argument("--prefill", type=int, default=2, help="prefill ranks")
    parser.add_argument("--decode", type=int, default=2, help="decode ranks")
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)

    async def demo(stopping: asyncio.Event) -> None:
        cluster = Cluster(arguments.config, prefill=arguments.prefill, decode=arguments.decode, settings=arguments.set)
        stories = [Story(index, prompt) for index, prompt in enumerate(PROMPTS, start=1)]
        began = time.monotonic()
        try:
            console.print(f"starting a router, {arguments.prefill} prefill and {arguments.decode} decode ranks on this machine ...")
            await cluster.start()
            console.print(f"up after {time.monotonic() - began:.1f} s; three prompts at once:")
            streams = asyncio.ensure_future(_stream_all(cluster.router_address, stories, arguments.max_tokens, console))
            stop = asyncio.ensure_future(stopping.wait())
            await asyncio.wait({streams, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not streams.done():
                streams.cancel()
                raise SetupError("the demo was interrupted")
            await streams
        finally:
            await cluster.stop()
        console.print(timeline_table(stories))
        console.print(transfer_table(stories))
        console.print("each text was prefilled in one process, handed over as latent KV through NIXL, and decoded in another.")

    run_process(demo)


if __name__ == "__main__":
    main()
