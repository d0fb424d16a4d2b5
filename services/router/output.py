"""What one choice of a request has produced: every token once, in order, whatever rank or attempt it came from; and the text of it.

It outlives attempts: after a replay text, stop strings and counts go on where they were.
"""

from collections.abc import Sequence
from typing import NamedTuple

from proto.baton.v1 import common_pb2, generation_pb2
from services.router.text import TextStream
from services.router.validate import Request


class Ending(NamedTuple):
    """Why no token follows."""

    reason: common_pb2.FinishReason
    stop_token_id: int | None = None
    stop_string: str = ""


class Gap(Exception):
    """Tokens came that do not follow the ones before: the sender is broken."""


class Output:
    """Tokens of one choice. `accept` takes them, `take_delta` gives what is new to the client."""

    def __init__(self, request: Request, token_bytes: Sequence[bytes], choice: int = 0) -> None:
        self._request, self._choice = request, choice
        self._text = TextStream(token_bytes, request.stops, request.include_stop_str)
        self._wants_logprobs = request.params.logprobs >= 0
        self._new_text: list[str] = []
        self._new_tokens: list[common_pb2.Token] = []
        self._num_shown = 0  # of token_ids, those in a delta already
        self.token_ids: list[int] = []
        self.ending: Ending | None = None

    def accept(
        self, first_index: int, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[common_pb2.TopLogprobs]
    ) -> None:
        """Take the tokens with output indices `first_index`.. that are new; nothing counts after the end. Raises Gap."""
        if self.ending is not None:
            return
        num_known = len(self.token_ids)
        if first_index > num_known:
            raise Gap(f"token {first_index} came but the next one is token {num_known}")
        if self._wants_logprobs and len(logprobs) != len(ids):
            raise Gap(f"{len(ids)} tokens came with {len(logprobs)} logprobs")
        for i in range(num_known - first_index, len(ids)):
            if self.ending is not None:
                return
            if self._wants_logprobs:
                top = tops[i] if i < len(tops) else None
                self._new_tokens.append(common_pb2.Token(id=ids[i], logprob=logprobs[i], top_logprobs=top))
            self._append(ids[i])

    def accept_one(self, index: int, token: common_pb2.Token) -> None:
        """Take a first token as prefill's reply and decode's `ready` carry it. Raises Gap."""
        self.accept(index, (token.id,), (token.logprob,), (token.top_logprobs,) if token.HasField("top_logprobs") else ())

    def _append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        if token_id in self._request.end_ids:
            self.end(Ending(common_pb2.STOP, stop_token_id=token_id))
            return
        self._show(self._text.feed(token_id))
        if self._text.matched:
            self.ending = Ending(common_pb2.STOP, stop_string=self._text.matched)
        elif len(self.token_ids) >= self._request.params.max_tokens:
            self.end(Ending(common_pb2.LENGTH))

    def end(self, ending: Ending) -> None:
        """No token follows: show the text that was held back. Without effect after an end."""
        if self.ending is not None:
            return
        self.ending = ending
        self._show(self._text.flush())
        if self._text.matched:  # the last, broken character completed a stop string
            self.ending = Ending(common_pb2.STOP, stop_string=self._text.matched)

    def _show(self, text: str) -> None:
        if text:
            self._new_text.append(text)

    def take_delta(self) -> generation_pb2.GenerateReply | None:
        """What came since the last call, as the client sees it."""
        ids = self.token_ids[self._num_shown :]
        if not ids and not self._new_text:
            return None
        delta = generation_pb2.Delta(choice=self._choice, text="".join(self._new_text), token_ids=ids, tokens=self._new_tokens)
        self._num_shown = len(self.token_ids)
        self._new_text, self._new_tokens = [], []
        return generation_pb2.GenerateReply(delta=delta)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
