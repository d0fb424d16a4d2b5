"""Everything a prefill rank loads before it may say `Up`: model, pages, transport; and one forward to have it all warm."""
import dataclasses
import sys
import time
from pathlib import Path

from services.kv.events import KvEventPublisher
from services.kv.fault_control import fault_plan
from services.kv.layout import PAGE_SIZE, KvLayout, compatibility
from services.kv.pages import Holder, HolderKind
from services.kv.rank_kv import RankKv, open_rank_kv
from services.model.config import ModelConfig, load_config, max_model_len
from services.model.loader import no_progress, revision, show_progress, stream_weights
from services.model.params import SAMPLER_VERSION
from services.prefill.forward import PrefillChunk, PrefillForward
from services.runtime.config import Config
from services.runtime.ipc import Up
from services.runtime.security import Security

_WARM_PAGES = 4


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parts of a rank that is ready."""

    model: ModelConfig
    kv: RankKv
    forward: PrefillForward
    max_model_len: int
    token_s: float  # seconds that a prompt token takes
    events: KvEventPublisher | None  # None: kv_events is off

    def up(self, max_running: int, former_instance_id: str = "") -> Up:
        """The rank's first event, and what it says when it has renewed its transfer agent."""
        return Up(
            instance_id=self.kv.instance_id, peer=self.kv.transport.metadata(), fingerprint=self.kv.compatibility.fingerprint,
            max_model_len=self.max_model_len, vocab_size=self.model.vocab_size, page_size=PAGE_SIZE, num_pages=self.kv.pool.num_pages,
            max_running=max_running, former_instance_id=former_instance_id,
            kv_events_port=self.events.port if self.events else 0, kv_replay_port=self.events.replay_port if self.events else 0,
        )

    def turn(self) -> None:
        """What the hand-off thread does besides hand-offs."""
        if self.events:
            self.events.turn()

    def close(self) -> None:
        """Once no thread uses it any more."""
        if self.events:
            self.events.close()
        self.kv.close()


def load(config: Config, rank: int) -> Loaded:
    """Load the model folder, register memory, run a forward. Raises SetupError in one sentence."""
    section, folder = config.prefill, Path(config.model.path)
    model = load_config(folder)
    longest = max_model_len(model, config.model.max_model_len, folder)
    # One bar a front is enough, and none where nobody looks or where a cluster tells of the start (it takes our stdout away).
    is_watched = sys.stdout.isatty() and sys.stderr.isatty()
    progress = show_progress("prefill: weights") if rank == 0 and is_watched else no_progress
    forward = PrefillForward(model, stream_weights(folder, model, progress))
    layout = KvLayout(
        num_layers=model.num_hidden_layers, kv_lora_rank=model.kv_lora_rank, rope_dim=model.qk_rope_head_dim, dtype=section.dtype
    )
    mine = compatibility(dataclasses.asdict(model), revision(folder), layout, sampler_version=SAMPLER_VERSION)
    events = KvEventPublisher.open(section, "prefill", rank, folder, Security.of(config.security))
    kv = open_rank_kv(layout=layout, num_pages=section.num_pages, transport=section.transport, compatibility=mine,
                      faults=fault_plan(config.faults, "prefill", rank), kv_network=section.kv_network,
                      on_change=events.log if events else None)
    return Loaded(model, kv, forward, longest, warm_up(forward, kv), events)


def warm_up(forward: PrefillForward, kv: RankKv) -> float:
    """First forwards cost what later ones do not (thread pools, code paths, page faults): pay before anybody waits.

    Returns seconds a token, so that already the first step's time can be predicted.
    """
    holder = Holder(HolderKind.REQUEST, "warm-up")
    with kv.lock:
        pages = kv.pool.take(min(_WARM_PAGES, kv.pool.num_available), holder)
    last, began = len(pages) * PAGE_SIZE - 1, time.perf_counter()
    for start, num_tokens in ((0, last), (last, 1)):  # from scratch, then one that reads the pages
        forward.run(kv.memory.pages, [PrefillChunk(token_ids=[0] * num_tokens, start=start, page_table=pages, want_logits=True)])
    with kv.lock:
        kv.pool.release(holder)
    return (time.perf_counter() - began) / (last + 1)
