"""Pulls of a request that its holder still runs: the pages wanted are those announced, within the room taken for them."""
import pytest

from services.kv.messages import Announce, AnnouncedPage, HandoffState, RequestKey
from services.kv.pull import MAX_BEYOND_GAP, Pull, PullState

KEY = RequestKey("r", 0, 1)


def announce(sequence: int, *indices: int, num_tokens: int | None = None) -> Announce:
    state = None if num_tokens is None else HandoffState(first_token=5, num_prompt_tokens=num_tokens)
    pages = tuple(AnnouncedPage(index, 100 + index, 7) for index in indices)
    return Announce(key=KEY, holder="h", reader="r", sequence=sequence, pages=pages, state=state)


def opened(room: int = 6, num_cached: int = 0) -> Pull:
    pull = Pull(KEY, "h", 0.0)
    pull.begin({index: 10 + index for index in range(num_cached, room)}, room=room)
    return pull


def read(pull: Pull) -> list[int]:
    """Read all that can be read; the indices."""
    indices = [index for batch in pull.next_batches(1.0) for index in batch[0]]
    pull.pages_read(indices, len(indices))
    return indices


def test_what_is_announced_is_wanted() -> None:
    pull = opened()
    assert not pull.catches_up(), "nothing is announced yet"
    pull.announced(announce(0, 0, 1), 1.0)
    assert not pull.catches_up() and read(pull) == [0, 1] and pull.catches_up()
    assert not pull.catches_up(), "said once"
    pull.announced(announce(1, 2), 2.0)
    assert read(pull) == [2] and not pull.is_complete and not pull.catches_up()
    pull.announced(announce(2, 3, num_tokens=200), 3.0)
    assert not pull.is_complete and read(pull) == [3] and pull.is_complete and not pull.is_short
    assert pull.to_verify() == [0, 1, 2, 3]


def test_empty_announcement_is_one() -> None:
    pull = opened()
    pull.announced(announce(0), 1.0)
    assert read(pull) == [] and pull.catches_up()


def test_reads_in_flight_and_gaps_are_not_caught_up() -> None:
    pull = opened()
    pull.announced(announce(0), 1.0)
    pull.num_reads = 1
    assert not pull.catches_up()
    pull.num_reads = 0
    pull.announced(announce(2, 1), 1.0)
    assert not pull.catches_up() and pull.has_gap
    pull.announced(announce(1, 0), 1.0)
    assert read(pull) == [0, 1] and pull.catches_up()


def test_cached_pages_are_not_read() -> None:
    pull = opened(num_cached=2)
    pull.announced(announce(0, 0, 1, 2, num_tokens=150), 1.0)
    assert read(pull) == [2] and pull.is_complete and not pull.is_short and pull.to_verify() == [2]


@pytest.mark.parametrize(("indices", "num_tokens", "short", "outgrown"), [
    ((0, 1, 2), 150, False, False),
    ((0, 2), 150, True, False),
    ((0, 1), 150, True, False),
    ((0, 1, 2, 3, 4, 5), 384, False, False),
    ((0, 1, 2, 3, 4, 5, 6), 385, False, True),
    ((6,), None, False, True),
])
def test_short_and_outgrown(indices: tuple[int, ...], num_tokens: int | None, short: bool, outgrown: bool) -> None:
    pull = opened()
    pull.announced(announce(0, *indices, num_tokens=num_tokens), 1.0)
    assert (pull.is_short, pull.is_outgrown) == (short, outgrown)


def test_closed_pulls_never_outgrow_nor_catch_up() -> None:
    pull = Pull(KEY, "h", 0.0)
    pull.begin({0: 10})
    pull.announced(announce(0, 0, 9, num_tokens=10), 1.0)
    assert read(pull) == [0] and not pull.is_outgrown and not pull.catches_up() and pull.is_complete


def test_nothing_follows_the_last_announcement() -> None:
    pull = opened()
    pull.announced(announce(0, 0, num_tokens=10), 1.0)
    pull.announced(announce(1, 1), 2.0)
    assert read(pull) == [0] and pull.next_sequence == 1 and not pull.has_gap


def test_announcements_beyond_a_gap_are_bounded_and_asked_for_again() -> None:
    pull = Pull(KEY, "h", 0.0)
    pull.begin({index: index for index in range(100)}, room=100)
    taken = [pull.announced(announce(sequence, sequence), 1.0) for sequence in range(1, 100)]
    assert taken == [True] * MAX_BEYOND_GAP + [False] * (99 - MAX_BEYOND_GAP)
    assert pull.announced(announce(5, 5), 1.0), "one that is kept already is no new one"
    assert pull.announced(announce(0, 0), 1.0) and pull.next_sequence == MAX_BEYOND_GAP + 1
    for sequence in range(pull.next_sequence, 100):  # as a renewal's answer brings them
        assert pull.announced(announce(sequence, sequence), 1.0)
    assert sorted(read(pull)) == list(range(100)) and pull.state is PullState.FETCHING
