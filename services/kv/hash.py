"""The chained digest of a page's tokens: the key of every prefix cache and of the router's index (no torch here).

    digest = blake2b-128(parent digest (16 bytes, zeros for the first page) | u32 length of salt | salt | 64 x u32 ids | u32 next id)

All integers little-endian. The next id takes part because slot i of the MTP layer depends on token i + 1: a page is final, and has a
digest, only once the token after it is known.
"""
import hashlib
import sys
from array import array
from collections.abc import Sequence

from services.kv.layout import PAGE_SIZE

DIGEST_BYTES = 16
ROOT = bytes(DIGEST_BYTES)  # parent of a prompt's first page

_EMPTY = hashlib.blake2b(digest_size=DIGEST_BYTES)  # a copy of it costs less than its arguments


def page_digest(parent: bytes, ids: Sequence[int], next_id: int, salt: bytes = b"") -> bytes:
    """Digest of one page: exactly PAGE_SIZE `ids`, then the id that follows them. Raises OverflowError for an id beyond 32 bits."""
    assert len(parent) == DIGEST_BYTES and len(ids) == PAGE_SIZE, f"{len(parent)=} {len(ids)=}"
    return _chain(parent, _words([*ids, next_id]), salt)[0]


def page_digests(ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Digests of every page of `ids` that has one: page i needs token 64 * (i + 1), so n tokens give (n - 1) // 64 digests.

    Raises OverflowError for an id beyond 32 bits.
    """
    return _chain(ROOT, _words(ids), salt)


def _chain(parent: bytes, words: bytes, salt: bytes) -> list[bytes]:
    """Digests of all pages of `words` (ids as little-endian u32) whose next id is there, the first one's parent given."""
    salted = len(salt).to_bytes(4, "little") + salt
    fresh, page_bytes = _EMPTY.copy, 4 * PAGE_SIZE
    digests: list[bytes] = []
    for start in range(0, len(words) - page_bytes, page_bytes):
        page = fresh()
        page.update(parent + salted + words[start : start + page_bytes + 4])
        parent = page.digest()
        digests.append(parent)
    return digests


def _words(ids: Sequence[int]) -> bytes:
    words = array("I")
    words.fromlist(ids if isinstance(ids, list) else list(ids))  # four times faster than going through numpy
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
