"""Where one choice's time went, as its last message tells: usage counts each token once, whatever was retried, replayed or moved."""

import time

from proto.baton.v1 import common_pb2, decode_pb2, generation_pb2, prefill_pb2
from services.router.metrics import CACHED_TOKENS, ITL_SECONDS, OUTPUT_TOKENS, PROMPT_TOKENS, RECOVERIES, TTFT_SECONDS
from services.router.output import Ending, Output
from services.router.pairing import Pair
from services.router.rank_state import RankState
from services.router.validate import Request
from services.runtime.telemetry import reason_name


class TimelineRecord:
    """Filled in by dispatch as things happen; monotonic seconds."""

    def __init__(self, request: Request, choice: int) -> None:
        self._request, self._choice = request, choice
        self._received_at = request.received_at
        self._called_at = 0.0  # Prefill.Run of the current attempt
        self._first_at = 0.0  # first token given to the client
        self._last_at = 0.0
        self._ready_at = 0.0
        self.num_cached_tokens = 0
        self._message = generation_pb2.Timeline()
        self._has_prefill = False
        self._pending: tuple[generation_pb2.Recovery, float] | None = None  # it waits for its first token, since then
        self.num_retries = 0

    def called(self, pair: Pair) -> None:
        """A pair was chosen and is being called."""
        self._called_at = time.monotonic()
        self._message.prefill_rank = pair.prefill.name
        self._message.decode_rank = pair.decode.name if pair.decode is not None else ""
        self._message.routing = pair.reason

    def moved(self, decode: RankState) -> None:
        """Another decode rank has it."""
        self._message.decode_rank = decode.name

    def recover(
        self, path: generation_pb2.Recovery.Path, reason: common_pb2.Reason, role: str, num_tokens: int, *, is_free: bool
    ) -> generation_pb2.Recovery:
        """An attempt after the first begins, on `path`, because the one before it ended for `reason`."""
        self.num_retries += not is_free
        RECOVERIES.labels(generation_pb2.Recovery.Path.Name(path).lower(), reason_name(reason)).inc()
        return self._message.recoveries.add(path=path, reason=reason, role=role, num_tokens=num_tokens, is_free=is_free)

    def await_token(self, recovery: generation_pb2.Recovery, since: float) -> None:
        """The next token is what `recovery` brought, `since` = when tokens stopped."""
        self._pending = recovery, since

    def progressed(self) -> None:
        """A token came that was not there before."""
        if self._pending is not None:
            recovery, since = self._pending
            recovery.us = max(_us(time.monotonic() - since), 1)  # 0 = it brought none
            self._pending = None

    def prefilled(self, reply: prefill_pb2.PrefillReply, is_replay: bool) -> None:
        """Prefill's times and cache hits: of the attempt that made the first token; a replay counts nothing."""
        if self._has_prefill or is_replay:
            return
        self._has_prefill = True
        self._message.queue_us = _us(self._called_at - self._received_at) + reply.queue_us
        self._message.prefill_us = reply.compute_us
        self.num_cached_tokens = min(reply.num_cached_tokens, len(self._request.prompt_ids))
        if self._choice == 0:
            CACHED_TOKENS.inc(self.num_cached_tokens)

    def ready(self, ready: decode_pb2.Ready) -> None:
        """Decode has all pages."""
        self._ready_at = self._ready_at or time.monotonic()
        self._message.transfer.CopyFrom(ready.transfer)

    def shown(self, num_tokens: int) -> None:
        """Text and `num_tokens` tokens went to the client."""
        now, last_at = time.monotonic(), self._last_at
        self._last_at = now
        if self._first_at and num_tokens:
            ITL_SECONDS.observe((now - last_at) / num_tokens, num_tokens)
        elif not self._first_at:
            self._first_at = now
            if self._choice == 0:  # once a request
                TTFT_SECONDS.observe(now - self._received_at)
                PROMPT_TOKENS.inc(len(self._request.prompt_ids))
        OUTPUT_TOKENS.add(num_tokens)

    def drafts(self, num_accepted: int) -> None:
        self._message.num_accepted_drafts += num_accepted

    def finished(self, output: Output, ending: Ending) -> generation_pb2.GenerateReply:
        """The last message."""
        finished = generation_pb2.Finished(choice=self._choice, reason=ending.reason, timeline=self._timeline(output.num_tokens))
        if ending.stop_token_id is not None:
            finished.stop_token_id = ending.stop_token_id
        elif ending.stop_string:
            finished.stop_string = ending.stop_string
        finished.usage.prompt_tokens = len(self._request.prompt_ids)
        finished.usage.completion_tokens = output.num_tokens
        finished.usage.cached_tokens = self.num_cached_tokens
        return generation_pb2.GenerateReply(finished=finished)

    def _timeline(self, num_tokens: int) -> generation_pb2.Timeline:
        message = self._message
        message.ttft_us = _us(self._first_at - self._received_at)
        message.decode_us = _us(self._last_at - self._ready_at) if self._ready_at else 0
        message.tpot_us = _us((self._last_at - self._first_at) / (num_tokens - 1)) if num_tokens > 1 else 0
        message.num_retries = self.num_retries
        return message


def _us(seconds: float) -> int:
    return max(int(seconds * 1e6), 0)
