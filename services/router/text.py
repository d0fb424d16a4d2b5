"""Tokens become text: no broken character is ever shown, and nothing of a stop string.

All deltas joined equal the whole decode of the same ids (bytes that are no UTF-8 as U+FFFD), cut at the first stop string to be complete.
"""

import codecs
from collections.abc import Sequence


class Detokenizer:
    """Bytes of tokens to text, holding back an incomplete character. Amortised O(1) a byte."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: of each id; ids beyond it show nothing."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Text that this token completes."""
        return self._decoder.decode(self._token_bytes[token_id]) if token_id < len(self._token_bytes) else ""

    def flush(self) -> str:
        """What is left at the end: nothing, or U+FFFD for a character that never came whole."""
        return self._decoder.decode(b"", final=True)


class StopAutomaton:
    """Finds the stop string that is complete first (the longest of those that end together): Aho-Corasick over characters.

    Its state is the longest suffix of the text that begins a stop string, which is exactly what has to be held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]  # of a state: characters held back
        self.match = [""]  # of a state: the stop string that it completes, or ""
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append("")
            state = self._next[state][character]
        self.match[state] = stop

    def _link(self) -> None:
        """Breadth first: a state's longest proper suffix that is a state too, and the match that it inherits from there."""
        queue = list(self._next[0].values())
        for state in queue:
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                self.match[child] = self.match[child] or self.match[self._fail[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """State after `character`."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)


class TextStream:
    """Text of one request's tokens, up to its first stop string."""

    def __init__(self, token_bytes: Sequence[bytes], stops: Sequence[str] = (), include_stop_str: bool = False) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._automaton = StopAutomaton(stops) if stops else None
        self._include_stop_str = include_stop_str
        self._state = 0
        self._held = ""  # begins a stop string, not shown yet
        self.matched = ""  # stop string found; nothing is to be fed any more

    def feed(self, token_id: int) -> str:
        """Text that may be shown after this token."""
        return self._pass(self._detokenizer.feed(token_id))

    def flush(self) -> str:
        """The rest at the end of the stream, unless a stop string ended it."""
        if self.matched:
            return ""
        text = self._pass(self._detokenizer.flush())
        if not self.matched:
            text, self._held = text + self._held, ""
        return text

    def _pass(self, text: str) -> str:
        if self._automaton is None or not text:
            return text
        automaton = self._automaton
        for i, character in enumerate(text):
            self._state = automaton.step(self._state, character)
            if automaton.match[self._state]:
                return self._cut(self._held + text[: i + 1], automaton.match[self._state])
        text = self._held + text
        shown = len(text) - automaton.depth[self._state]
        self._held = text[shown:]
        return text[:shown]

    def _cut(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include_stop_str else text[: len(text) - len(stop)]
