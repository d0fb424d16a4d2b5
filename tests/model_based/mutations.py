"""Faults planted in the product: each takes out of a function one thing on which DESIGN.md section 5 rests.

A mutation edits the source of one function, which must hold the text to be replaced exactly once: when the product changes, the mutation
fails loudly instead of doing nothing.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest


class Edit(NamedTuple):
    """In `module.function` (`Class.method`), `old` becomes `new`."""

    module: str
    function: str
    old: str
    new: str


MUTATIONS: dict[str, tuple[Edit, ...]] = {
    "renewal not answered": (
        Edit("services.kv.lease", "LeaseTable._renew", "        self._send(reader, encode(answer))\n", ""),
    ),
    "renewal does not extend the lease": (
        Edit("services.kv.lease", "LeaseTable._renew", "            lease.deadline = self._clock() + self._ttl_s\n", ""),
    ),
    "renewal not asking for what was lost": (
        Edit("services.kv.lease", "LeaseTable._renew", "range(message.next_sequence, len", "range(len(lease.announcements), len"),
    ),
    "freed before the read ended": (
        Edit("services.kv.reads", "Reads.forget", "                read.pull = None\n",
             "                read.pull = None\n                self._pool.drop(read.local_pages, read.holder)\n"
             "                read.local_pages = []\n"),
    ),
    "epoch raised too late": (
        Edit("services.kv.pages", "PagePool.take", "        self._epochs[taken] += np.uint64(1)", "        pass"),
        Edit("services.kv.lease", "LeaseTable.announce", "        announced = tuple(",
             "        self._pool._epochs[[page for _, page in pages]] += 1\n        announced = tuple("),
    ),
    "epoch not raised": (
        Edit("services.kv.pages", "PagePool.take", "        self._epochs[taken] += np.uint64(1)", "        pass"),
    ),
    "restarted rank taken for its former instance": (
        Edit("services.kv.peers", "Peers.meet", "before != rank.instance_id or not transport.has_peer(rank.instance_id)", "not before"),
    ),
    "stale instance accepted by the reader": (
        Edit("services.kv.puller", "Puller.handle", "pull.holder != sender or message.holder != sender or ", ""),
    ),
    "stale instance accepted by the holder": (
        Edit("services.kv.lease", "LeaseTable.handle", " or (lease and sender not in lease.readers)", ""),
        Edit("services.kv.lease", "LeaseTable.handle", " or message.reader != sender", ""),
    ),
    "verified before the reads are DONE": (
        Edit("services.kv.pull", "Pull.is_complete", "not self._to_post and not self._to_read and self.num_reads == 0",
             "not self._to_post"),
    ),
    "Done sent before verification": (
        Edit("services.kv.puller", "Puller._verify", "        pull.state = PullState.VERIFYING\n",
             "        pull.state = PullState.VERIFYING\n"
             "        self._send(pull, Done(key=pull.key, holder=pull.holder, reader=self._transport.instance_id))\n"),
    ),
    "epoch compare skipped for one page": (
        Edit("services.kv.pull", "Pull.stale", "zip(indices, epochs, strict=True)", "list(zip(indices, epochs, strict=True))[1:]"),
    ),
    "quarantine dropped when a read is late": (
        Edit("services.kv.reads", "Reads.take_late", "            self._pool.hold(read.local_pages, quarantine)\n", ""),
        Edit("services.kv.reads", "Reads.take_late", "            read.holder = quarantine\n",
             "            read.holder, read.local_pages = quarantine, []\n"),
    ),
    "quarantine ends before the agent is destroyed": (
        Edit("services.kv.rank_kv", "RankKv._fence", "        former.transport.close()\n", ""),
    ),
    "redirect keeps the old key": (
        Edit("services.kv.lease", "LeaseTable.redirect", "        del self._leases[key]\n", ""),
    ),
    "redirect keeps the old readers": (
        Edit("services.kv.lease", "LeaseTable.redirect", "self._add(new_key, old.state, readers,",
             "self._add(new_key, old.state, old.readers,"),
    ),
    "moving page announced before it is full": (
        Edit("services.decode.moves", "Moves.pages_final", "if move is not None and move.num_announced < len(request.digests):",
             "if move is not None and move.num_announced < len(request.pages):"),
        Edit("services.decode.moves", "Moves.pages_final", "self._next_pages(move, len(request.digests))",
             "self._next_pages(move, len(request.pages))"),
    ),
    "paused request runs on": (
        Edit("services.decode.moves", "Moves._pause", "        self._scheduler.pause(request)\n", ""),
    ),
    "pause hands a token too few over": (
        Edit("services.decode.moves", "Moves._state", "num_prompt_tokens=request.position,", "num_prompt_tokens=request.position - 1,"),
    ),
    "prefix cache filled before verification": (
        Edit("services.decode.fetch", "Fetcher._take_pages", "        request.num_cached_pages = len(cached)\n",
             "        request.num_cached_pages = len(cached)\n"
             "        pool.insert(request.digests, request.pages[: len(request.digests)], request.token_ids)\n"),
    ),
    "old attempt's announcement accepted": (
        Edit("services.kv.puller", "Puller.handle", "pull = self._pulls.get(message.key)",
             "pull = next((p for k, p in self._pulls.items() if k.request_id == message.key.request_id), None)"),
    ),
    "lease dropped at the last announcement": (
        Edit("services.kv.lease", "LeaseTable.announce", "            lease.state = LeaseState.LEASED\n",
             "            lease.state = LeaseState.LEASED\n            self._pool.release(Holder(HolderKind.LEASE, key))\n"),
    ),
    "refusal not told to the holder": (
        Edit("services.kv.puller", "Puller.cancel", "            self._send(pull, Ended(key=key, holder=pull.holder, "
             "reader=self._transport.instance_id, reason=reason, message=message))\n", ""),
    ),
    "abort keeps the request's pages": (
        Edit("services.decode.fetch", "Fetcher._leave", "            self._kv.pool.release(request.holder)\n", "            pass\n"),
    ),
    "partial page announced before it is full": (
        Edit("services.prefill.engine", "PrefillEngine._commit", "chunk.prompt.num_computed // PAGE_SIZE",
             "-(-chunk.prompt.num_computed // PAGE_SIZE)"),
    ),
    "failed read counted as read": (
        Edit("services.kv.puller", "Puller._finish", "if read.state is not TransferState.DONE:", "if False:"),
    ),
}


def _edited(edits: list[Edit]):
    module = importlib.import_module(edits[0].module)
    owner_name, name = edits[0].function.split(".")
    owner = getattr(module, owner_name)
    is_property = isinstance(vars(owner)[name], property)
    function = vars(owner)[name].fget if is_property else vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(function))
    indent = "    "
    source = textwrap.indent(source, indent)  # as it stands in its class, so that edits can be read beside the product
    for edit in edits:
        found = source.count(edit.old)
        assert found == 1, f"{edit.function} holds {edit.old!r} {found} times, not once: the mutation is out of date"
        source = source.replace(edit.old, edit.new)
    source = textwrap.dedent(source).removeprefix("@property\n")
    namespace: dict[str, object] = {}
    exec(compile("from __future__ import annotations\n" + source, f"<{edits[0].function} with a fault>", "exec"), vars(module), namespace)
    made = namespace[name]
    return owner, name, property(made) if is_property else made  # type: ignore[arg-type]


@contextmanager
def planted(mutation: str) -> Iterator[None]:
    """The product with one fault in it."""
    by_function: dict[tuple[str, str], list[Edit]] = {}
    for edit in MUTATIONS[mutation]:
        by_function.setdefault((edit.module, edit.function), []).append(edit)
    with pytest.MonkeyPatch.context() as patch:
        for edits in by_function.values():
            patch.setattr(*_edited(edits))
        yield
