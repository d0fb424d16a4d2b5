"""One request on a decode rank, from claim to end. The handoff thread owns it until READY, the main loop from then on."""
from enum import StrEnum

import msgspec

from proto.baton.v1 import common_pb2
from services.kv.hash import ROOT, page_digest, page_digests
from services.kv.layout import PAGE_SIZE, num_pages_for
from services.kv.messages import HandoffState, PeerRank, RequestKey
from services.kv.pages import Holder, HolderKind
from services.model.params import SamplingParams
from services.runtime.errors import HandoffError


class RequestState(StrEnum):
    """Words of DESIGN.md section 5."""

    CLAIMED = "claimed"
    FETCHING = "fetching"
    READY = "ready"
    RUNNING = "running"
    PAUSED = "paused"  # the end of a move: its state is announced, so it takes part in no step
    FINISHED = "finished"
    ABORTED = "aborted"


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the router asks for. `token_ids` ends with the `num_output_tokens` tokens that were sent already."""

    key: RequestKey
    token_ids: list[int]
    num_output_tokens: int = 0
    salt: bytes = b""
    params: SamplingParams
    source: PeerRank
    num_preemptions: int = 0
    timeout_s: float = 0.0  # time left; 0 = none
    is_move: bool = False  # `source` is a decode rank that runs the request


class Logprobs(msgspec.Struct, frozen=True):
    """Of one token, as far as the request asked."""

    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Request:
    """`token_ids` are all tokens known, `pages` the page table; from READY on the last token known has no KV yet."""

    def __init__(self, session: int, handle: int, spec: RequestSpec, *, max_model_len: int, now: float) -> None:
        self.session, self.handle, self.spec = session, handle, spec
        self.key, self.params = spec.key, spec.params
        self.num_output_tokens = spec.num_output_tokens  # of the whole request, replayed ones included
        self.token_ids = list(spec.token_ids)
        self.num_handed_over = len(spec.token_ids)  # tokens whose KV comes from the holder
        self.num_prompt_tokens = len(spec.token_ids) - spec.num_output_tokens
        self.max_total_tokens = min(self.num_prompt_tokens + spec.params.max_tokens, max_model_len)
        self.deadline = now + spec.timeout_s if spec.timeout_s else None
        self.state = RequestState.CLAIMED
        self.pages: list[int] = []
        self.num_cached_pages = 0  # of the pages handed over, those that were here before
        self.handoff: HandoffState | None = None  # from READY on
        self.latest = Logprobs()  # of the last token known
        self.newest_attempt = spec.key.attempt  # this one, or the last one that it was to move to
        self.ready_at = 0.0
        self.stepped_at = 0.0  # the end of its latest step
        self.digests = page_digests(self.token_ids, spec.salt)  # of every page that is final

    @property
    def id(self) -> tuple[int, int]:
        """Unique on this rank."""
        return self.session, self.handle

    @property
    def holder(self) -> Holder:
        """Name under which the request holds pages."""
        return Holder(HolderKind.REQUEST, self.id)

    @property
    def num_pages_handed_over(self) -> int:
        """Pages of the tokens whose KV comes from the holder."""
        return num_pages_for(self.num_handed_over)

    @property
    def max_pages(self) -> int:
        """Pages of the longest that the request may become; its very last token never enters the KV."""
        return max(num_pages_for(self.max_total_tokens - 1), self.num_pages_handed_over)

    @property
    def position(self) -> int:
        """Where the last token known goes when it is fed to the model."""
        return len(self.token_ids) - 1

    @property
    def needs_page(self) -> bool:
        """Whether the next step's token begins a page that the request lacks."""
        return self.position // PAGE_SIZE >= len(self.pages)

    @property
    def has_all_pages(self) -> bool:
        """Whether no step of it can need another page."""
        return len(self.pages) >= self.max_pages

    @property
    def output_ids(self) -> list[int]:
        """All output tokens known, replayed ones included."""
        return self.token_ids[self.num_prompt_tokens :]

    def check_handoff(self, handoff: HandoffState) -> None:
        """Raises HandoffError unless decoding can go on from `handoff`."""
        theirs, ours = handoff.num_prompt_tokens, self.num_handed_over
        if self.spec.is_move:
            ours = self.num_prompt_tokens + len(handoff.output_ids)
            output_ids, known = [*handoff.output_ids, handoff.first_token], self.output_ids
            if output_ids[: len(known)] != known:
                message = f"the source's {len(output_ids)} output tokens do not begin with the {len(known)} that the router submitted"
                raise HandoffError(common_pb2.INTERNAL, message)
        if theirs != ours:
            raise HandoffError(common_pb2.INTERNAL, f"holder handed {theirs} tokens over but the router submitted {ours}")

    def take_over(self, handoff: HandoffState) -> None:
        """Go on from a checked `handoff`: its tokens are known from now on."""
        output_ids = [*handoff.output_ids, handoff.first_token] if self.spec.is_move else [*self.output_ids, handoff.first_token]
        for token_id in output_ids[len(self.output_ids) :]:
            self.append(token_id)
        self.handoff, self.num_handed_over = handoff, handoff.num_prompt_tokens
        self.latest = Logprobs(handoff.first_logprob, handoff.top_ids, handoff.top_logprobs)

    def append(self, token_id: int) -> bool:
        """Take a token in; whether a page became final by it (its digest is then the last of `digests`)."""
        self.token_ids.append(token_id)
        self.num_output_tokens += 1
        start = len(self.digests) * PAGE_SIZE
        end = start + PAGE_SIZE
        if end >= len(self.token_ids):
            return False
        parent = self.digests[-1] if self.digests else ROOT
        self.digests.append(page_digest(parent, self.token_ids[start:end], self.token_ids[end], self.spec.salt))
        return True
