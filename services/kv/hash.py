"""The chained digest of a page's tokens: the key of every prefix cache and of the router's index (no torch here).

    digest = blake2b-128(parent digest (16 bytes, zeros for the first page) | u32 length of salt | salt | 64 x u32 ids | u32 next id)

All integers little-endian. The next id takes part because slot i of the MTP layer depends on token i + 1: a page is final, and has a
digest, only once the token after it is known.
"""
import hashlib
import struct
from collections.abc import Sequence

from services.kv.layout import PAGE_SIZE

DIGEST_BYTES = 16
ROOT = bytes(DIGEST_BYTES)  # parent of a prompt's first page


def page_digest(parent: bytes, ids: Sequence[int], next_id: int, salt: bytes = b"") -> bytes:
    """Digest of one page: exactly PAGE_SIZE `ids`, then the id that follows them."""
    assert len(parent) == DIGEST_BYTES and len(ids) == PAGE_SIZE, f"{len(parent)=} {len(ids)=}"
    return _digest(parent, len(salt).to_bytes(4, "little") + salt, struct.pack(f"<{PAGE_SIZE + 1}I", *ids, next_id))


def page_digests(ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Digests of every page of `ids` that has one: page i needs token 64 * (i + 1), so n tokens give (n - 1) // 64 digests."""
    words = struct.pack(f"<{len(ids)}I", *ids)  # three times faster than going through numpy
    salted = len(salt).to_bytes(4, "little") + salt
    digests: list[bytes] = []
    parent = ROOT
    for start in range(0, len(words) - 4 * PAGE_SIZE, 4 * PAGE_SIZE):
        parent = _digest(parent, salted, words[start : start + 4 * PAGE_SIZE + 4])
        digests.append(parent)
    return digests


def _digest(parent: bytes, salted: bytes, words: bytes) -> bytes:
    return hashlib.blake2b(parent + salted + words, digest_size=DIGEST_BYTES).digest()
