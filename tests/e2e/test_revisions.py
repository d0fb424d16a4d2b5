"""Two revisions of a model side by side behind one router: both serve, no stream is of both, an incomplete one is not used."""

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from proto.baton.v1 import generation_pb2, generation_pb2_grpc
from services.doctor.oracle import DEMO_MODEL, Tally, check_stream
from services.model.config import load_config
from services.model.loader import load_tensors
from services.model.params import SamplingParams
from services.model.reference import Reference
from tests.clear import CLEAR
from tests.e2e.rig import Answer, Rig, generate_all, wait_until
from tests.families import write_family

POOL = ("prefill.num_pages=96", "decode.num_pages=96")


class Revisions:
    """A router, and fronts of revisions "a" and "b" as the test adds them."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: folder / name for name in "ab"}
        for seed, path in enumerate(self.folders.values()):
            write_family(path, "v3", seed, vocab_size=4096, max_position_embeddings=1024)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO_MODEL / name, path)
        self._references = {name: Reference(load_config(path), load_tensors(path)) for name, path in self.folders.items()}
        self.rig = Rig(0, 0, [f"model.path={self.folders['a']}", *POOL], folder / "run")
        self.fronts: dict[str, str] = {}  # process -> revision

    def add(self, role: str, revision: str) -> str:
        """A front of one rank, once the router knows it."""
        number = sum(self.fingerprints(role).values())
        name = self.rig.cluster.add_front(role, 1, settings=[f"model.path={self.folders[revision]}"])
        self.fronts[name] = revision
        self.rig.wait_for_ranks(role, number + 1)
        return name

    def fingerprints(self, role: str) -> Counter[str]:
        """Ranks that the router knows."""
        async def ask() -> generation_pb2.GetInfoReply:
            async with CLEAR.open_channel(self.rig.address) as channel:
                return await generation_pb2_grpc.GenerationStub(channel).GetInfo(generation_pb2.GetInfoRequest())

        return Counter({pool.fingerprint: pool.num_ranks for pool in self.rig.call(ask()).pools if pool.role == role})

    def revision_of(self, fields: dict[str, Any], answer: Answer) -> str:
        """The revision whose ranks served `answer`, which has to be that revision's through and through."""
        revisions = {self.rig.cluster.listens(name): revision for name, revision in self.fronts.items()}
        ranks = (answer.end.timeline.prefill_rank, answer.end.timeline.decode_rank)
        served = {revisions[rank.rpartition("/")[0]] for rank in ranks if rank}
        assert len(served) == 1, f"ranks {ranks} are of {served}"
        (revision,) = served
        assert self.equals(revision, fields, answer), f"the stream is not {revision}'s"
        return revision

    def equals(self, revision: str, fields: dict[str, Any], answer: Answer) -> bool:
        tally, sampling = Tally(), {key: value for key, value in fields.items() if key != "prompt"}
        check_stream(self._references[revision], fields["prompt"], SamplingParams(**sampling), answer.token_ids, tally)
        return len(answer.token_ids) == fields["max_tokens"] and not tally.wrong and tally.num_excused <= 1


@pytest.fixture
def revisions(tmp_path: Path) -> Iterator[Revisions]:
    made = Revisions(tmp_path)
    yield made
    made.rig.close()


def make_requests(number: int, seed: int, num_output: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {"prompt": [0, *(draw.randrange(3, 4000) for _ in range(draw.choice([3, 70, 150])))], "max_tokens": num_output, "ignore_eos": True,
         "temperature": 0.8 * (index % 2), "seed": draw.randrange(2**63)} for index in range(number)
    ]


@pytest.mark.slow
def test_two_revisions_side_by_side(revisions: Revisions) -> None:
    rig = revisions.rig
    for role, revision in (("prefill", "a"), ("decode", "a"), ("prefill", "b")):
        revisions.add(role, revision)
    assert len(revisions.fingerprints("prefill")) == 2
    requests = make_requests(8, 1, 12) + make_requests(4, 2, 1)
    answers = generate_all(rig.address, requests, at_once=6)
    assert {revisions.revision_of(*one) for one in zip(requests, answers, strict=True)} == {"a"}, "b cannot decode yet"
    assert not any(revisions.equals("b", *one) for one in zip(requests, answers, strict=True) if one[0]["max_tokens"] > 1)

    decode_b = revisions.add("decode", "b")
    requests = make_requests(24, 3, 12)
    answers = generate_all(rig.address, requests, at_once=6)
    served = Counter(revisions.revision_of(*one) for one in zip(requests, answers, strict=True))
    assert min(served["a"], served["b"]) >= 6, served

    requests = make_requests(8, 4, 400)
    answers = _with_a_kill(revisions, requests, decode_b)
    served = Counter(revisions.revision_of(*one) for one in zip(requests, answers, strict=True))
    paths = Counter(recovery.path for answer in answers for recovery in answer.end.timeline.recoveries)
    assert paths[generation_pb2.Recovery.REPLAY] and min(served["a"], served["b"]) > 0, served
    rig.settle()


def _with_a_kill(revisions: Revisions, requests: list[dict[str, Any]], victim: str) -> list[Answer]:
    """All of `requests` at once; the only decode engine of a revision is killed while its streams run: they wait for its successor."""
    rig = revisions.rig
    address = f"{rig.cluster.listens(victim)}/0"

    def runs_some() -> bool:
        rank = rig.watcher.serving("decode").get(address)
        load = rig.watcher.loads.get(rank.instance_id) if rank is not None else None
        return load is not None and load.num_running >= 2

    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(generate_all, rig.address, requests, at_once=len(requests))
        wait_until(runs_some, 30, lambda: f"{victim} never ran two of them")
        psutil.Process(rig.cluster.engine_pids(victim)[0]).kill()
        return work.result(timeout=120)
