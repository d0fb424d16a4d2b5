"""Where one request's time went, as its last message tells: usage counts each token once, whatever was retried or replayed."""

import time

from proto.baton.v1 import decode_pb2, generation_pb2, prefill_pb2
from services.router.output import Ending, Output
from services.router.pairing import Pair
from services.router.validate import Request


class TimelineRecord:
    """Filled in by dispatch as things happen; monotonic seconds."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._received_at = request.received_at
        self._called_at = 0.0  # Prefill.Run of the current attempt
        self._first_at = 0.0  # first token given to the client
        self._last_at = 0.0
        self._ready_at = 0.0
        self._num_cached_tokens = 0
        self._pair: Pair | None = None
        self._message = generation_pb2.Timeline()
        self._has_prefill = False
        self.num_retries = 0

    def called(self, pair: Pair) -> None:
        """A pair was chosen and is being called."""
        self._pair = pair
        self._called_at = time.monotonic()

    def prefilled(self, reply: prefill_pb2.PrefillReply, is_replay: bool) -> None:
        """Prefill's times and cache hits: of the attempt that made the first token; a replay counts nothing."""
        if self._has_prefill or is_replay:
            return
        self._has_prefill = True
        self._message.queue_us = _us(self._called_at - self._received_at) + reply.queue_us
        self._message.prefill_us = reply.compute_us
        self._num_cached_tokens = min(reply.num_cached_tokens, len(self._request.prompt_ids))

    def ready(self, ready: decode_pb2.Ready) -> None:
        """Decode has all pages."""
        self._ready_at = self._ready_at or time.monotonic()
        self._message.transfer.CopyFrom(ready.transfer)

    def shown(self) -> None:
        """Tokens went to the client."""
        self._last_at = time.monotonic()
        self._first_at = self._first_at or self._last_at

    def drafts(self, num_accepted: int) -> None:
        self._message.num_accepted_drafts += num_accepted

    def finished(self, output: Output, ending: Ending) -> generation_pb2.GenerateReply:
        """The last message."""
        finished = generation_pb2.Finished(reason=ending.reason, timeline=self._timeline(output.num_tokens))
        if ending.stop_token_id is not None:
            finished.stop_token_id = ending.stop_token_id
        elif ending.stop_string:
            finished.stop_string = ending.stop_string
        finished.usage.prompt_tokens = len(self._request.prompt_ids)
        finished.usage.completion_tokens = output.num_tokens
        finished.usage.cached_tokens = self._num_cached_tokens
        return generation_pb2.GenerateReply(finished=finished)

    def _timeline(self, num_tokens: int) -> generation_pb2.Timeline:
        message = self._message
        message.ttft_us = _us(self._first_at - self._received_at)
        message.decode_us = _us(self._last_at - self._ready_at) if self._ready_at else 0
        message.tpot_us = _us((self._last_at - self._first_at) / (num_tokens - 1)) if num_tokens > 1 else 0
        message.num_retries = self.num_retries
        if self._pair is not None:
            message.prefill_rank = self._pair.prefill.name
            message.decode_rank = self._pair.decode.name if self._pair.decode is not None else ""
            message.routing = self._pair.reason
        return message


def _us(seconds: float) -> int:
    return max(int(seconds * 1e6), 0)
