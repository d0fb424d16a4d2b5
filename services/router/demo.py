"""`make demo`: a whole cluster on this machine, three prompts streamed at once, and where each one's time went.

    python -m services.router.demo [--config deploy/dev.toml] [--prefill 2 --decode 2] [--max-tokens 96] [--n 2]
"""

import asyncio
import sys
from collections.abc import Sequence

import grpc.aio
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.router.demo_tables import LEGEND, rank_table, timeline_table, transfer_table
from services.runtime.cluster import add_rank_arguments, rank_counts
from services.runtime.config import argument_parser
from services.runtime.errors import Interrupted, SetupError
from services.runtime.local_cluster import Cluster
from services.runtime.process import run_process, say
from services.runtime.security import Security
from services.runtime.serve import cancel, first_of

_PANEL_WIDTH = 52
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
    """One choice of one prompt, the text so far, and how it ended."""

    def __init__(self, index: int, prompt: str, name: str) -> None:
        """`index`: of the request, from 1; `name`: what the reader sees."""
        self.index = index
        self.prompt = prompt
        self.name = name
        self.text = ""
        self.num_tokens = 0
        self.finished: generation_pb2.Finished | None = None
        self._printed = 0

    def panel(self, console: Console, width: int, height: int | None = None) -> Panel:
        """The end of the prompt and the answer; with `height`, only the last lines that fit in it."""
        body = Text("\n".join(self.prompt.splitlines()[-3:]) + "\n", style="dim") + Text(self.text)
        lines = body.wrap(console, width - 4)
        shown = Text("\n").join(lines[-max(height - 2, 1):] if height is not None else lines)
        return Panel(shown, title=f"request {self.name}", subtitle=f"{self.num_tokens} tokens", width=width)

    def print_lines(self, console: Console, *, final: bool) -> None:
        """For output that is no terminal: whole lines as soon as they are there."""
        end = len(self.text) if final else self.text.rfind("\n") + 1
        for line in self.text[self._printed:end].splitlines():
            console.print(f"[{self.name}] {line}", markup=False, highlight=False)
        self._printed = max(end, self._printed)


async def _tell(stub: generation_pb2_grpc.GenerationStub, choices: Sequence[Story], max_tokens: int, console: Console) -> None:
    """One request; what becomes of its choices goes into theirs."""
    first = choices[0]
    request = generation_pb2.GenerateRequest(
        text=first.prompt, max_tokens=max_tokens, temperature=0.8, seed=first.index, ignore_eos=True, n=len(choices)
    )
    async for reply in stub.Generate(request):
        story = choices[reply.finished.choice if reply.HasField("finished") else reply.delta.choice]
        if reply.HasField("delta"):
            story.text += reply.delta.text
            story.num_tokens += len(reply.delta.token_ids)
        elif reply.HasField("finished"):
            story.finished = reply.finished
        if not console.is_terminal:
            story.print_lines(console, final=story.finished is not None)


def _panels(console: Console, stories: Sequence[Story], *, whole: bool) -> RenderableType:
    """Side by side where there is room, else one below the other; unless `whole`, no higher than the terminal."""
    side_by_side = console.width >= len(stories) * _PANEL_WIDTH
    width = _PANEL_WIDTH if side_by_side else console.width
    height = None if whole else (console.height - 1) // (1 if side_by_side else len(stories))
    panels = [story.panel(console, width, height) for story in stories]
    return Columns(panels) if side_by_side else Group(*panels)


async def _stream_all(
    address: str, security: Security, stories: Sequence[Story], max_tokens: int, console: Console
) -> None:
    async with security.open_channel(address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        requests = [[story for story in stories if story.index == index] for index in sorted({story.index for story in stories})]
        streams = [asyncio.ensure_future(_tell(stub, choices, max_tokens, console)) for choices in requests]
        try:
            if console.is_terminal:
                with Live(console=console, refresh_per_second=20, transient=True) as live:
                    left: set[asyncio.Future[None]] = set(streams)
                    while left:
                        live.update(_panels(console, stories, whole=False))
                        _, left = await asyncio.wait(left, timeout=0.05)
                console.print(_panels(console, stories, whole=True))
            for stream in streams:
                await stream
        except grpc.aio.AioRpcError as error:
            raise SetupError(f"the demo's request failed with {error.code().name}: {error.details()}") from None
        finally:
            await cancel(*streams)


def main() -> None:
    parser = argument_parser("Baton's demo: a cluster, three streams, a timeline")
    add_rank_arguments(parser)
    parser.add_argument("--max-tokens", type=int, default=96, help="new tokens a prompt (default 96)")
    parser.add_argument("--n", type=int, default=1, choices=range(1, 5), help="choices a prompt, 1 to 4 (default 1)")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 80)

    async def demo(stopping: asyncio.Event) -> None:
        prefill, decode = rank_counts(arguments)
        cluster = Cluster(arguments.config, prefill=prefill, decode=decode, settings=arguments.set, report=say)
        stories = [
            Story(index, prompt, f"{index}.{choice}" if arguments.n > 1 else str(index))
            for index, prompt in enumerate(PROMPTS, start=1) for choice in range(arguments.n)
        ]
        try:
            await cluster.start(stopping)
            say("three prompts at once:")
            await first_of(
                _stream_all(cluster.router_address, cluster.security, stories, arguments.max_tokens, console), stopping.wait()
            )
            if any(story.finished is None for story in stories):
                raise Interrupted("the demo was interrupted; nothing is left running")
        finally:
            await cluster.stop()
        ends = {story.name: story.finished for story in stories if story.finished is not None}
        for table in (timeline_table(ends), rank_table(ends), transfer_table(ends)):
            console.print(table)
        console.print(LEGEND, highlight=False)

    run_process(demo)


if __name__ == "__main__":
    main()
