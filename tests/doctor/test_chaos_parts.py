"""What a chaos run is made of, each part alone: decks, requests, the verifier, the conclusions, namespaces and what they leave."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proto.baton.v1 import common_pb2, generation_pb2
from services.doctor.chaos.actions import Actions
from services.doctor.chaos.control import RankControl
from services.doctor.chaos.deck import Rotation, shuffled_decks
from services.doctor.chaos.kinds import KINDS, Fired, variants
from services.doctor.chaos.load import Outcome, Seen
from services.doctor.chaos.netns import Network, why_unavailable
from services.doctor.chaos.report import Demand, Findings, Report, demand_of
from services.doctor.chaos.requests import Deal, Draw, Template
from services.doctor.chaos.stage import Stage
from services.doctor.chaos.text import describe
from services.doctor.chaos.verify import Verifier
from services.doctor.chaos.worker import Job, Verdict
from services.doctor.oracle import demo_reference
from services.kv.fault_control import FaultControl
from services.model.params import SamplingParams
from services.runtime.config import FaultRates, load_config

PROMPT = (0, *range(100, 140))
PARAMS = SamplingParams(max_tokens=6, seed=3, temperature=0.0, ignore_eos=True, logprobs=0)


def test_decks_are_equal_shuffled_and_a_function_of_the_seed() -> None:
    drawn = list(itertools.islice(shuffled_decks(KINDS, seed=7), 22 * len(KINDS)))
    assert set(Counter(drawn).values()) == {22}
    decks = [tuple(drawn[start : start + len(KINDS)]) for start in range(0, len(drawn), len(KINDS))]
    assert all(set(deck) == set(KINDS) for deck in decks) and len(set(decks)) > 15
    assert drawn == list(itertools.islice(shuffled_decks(KINDS, seed=7), len(drawn)))
    assert drawn != list(itertools.islice(shuffled_decks(KINDS, seed=8), len(drawn)))


def test_rotation_takes_whoever_was_taken_longest_ago_of_those_there() -> None:
    rotation = Rotation()
    assert [rotation.take(there) for there in ("abc", "abc", "ac", "abc", "bc", "abc")] == ["a", "b", "c", "a", "b", "c"]


def test_every_kind_has_variants_and_short_runs_begin_with_those_that_take_every_path() -> None:
    nobody: Any = None
    table = variants(Actions(nobody, nobody, nobody))
    assert sorted(table) == sorted(KINDS) and all(table.values())
    assert table["sigkill"][0].name == "decode engine while it fetches", "redirects"
    assert table["drain"][0].name == "decode", "moves"
    roles = {kind: {variant.role for variant in each} for kind, each in table.items()}
    assert all({"prefill", "decode"} <= roles[kind] for kind in ("sigkill", "sigstop", "partition", "restart", "drain"))


def test_requests_are_of_the_kinds_asked_for() -> None:
    draws = [deal.next() for deal in [Deal(seed=5)] for _ in range(3000)]
    assert draws[:50] == [deal.next() for deal in [Deal(seed=5)] for _ in range(50)]
    templates = {draw.template for draw in draws}
    assert 200 <= len(templates) <= 300
    lengths, params = [len(template.prompt_ids) for template in templates], [template.params for template in templates]
    assert 5 <= min(lengths) < 40 and 350 < max(lengths) <= 400
    assert all(64 <= each.max_tokens <= 100 for each in params)
    assert any(each.is_greedy for each in params) and any(each.has_penalties and not each.is_greedy for each in params)
    assert {each.logprobs for each in params} == {-1, 0, 3} and any(template.stops for template in templates)
    assert 5 < sum(template.num_choices == 2 for template in templates) < 40
    vanishing = [draw for draw in draws if draw.leaves_after is not None]
    assert 0.03 < len(vanishing) / len(draws) < 0.07
    tenants = Counter(draw.tenant for draw in draws)
    assert 0.3 < tenants.pop("") / len(draws) < 0.5 and set(tenants.values()) == {1}


@pytest.fixture(scope="module")
def right() -> Job:
    """What Mono says to PROMPT, as a client would see it."""
    verifier = Verifier()
    ids, reference = list[int](), demo_reference()
    for _ in range(PARAMS.max_tokens):
        kv = reference.new_cache()
        ids.append(int(reference.logits(reference.hidden(torch.tensor([*PROMPT, *ids]), kv))[-1].argmax()))
    job = Job(4, PROMPT, PARAMS, 0, tuple(ids), (), (), "", "LENGTH")
    comparison = verifier._compare(job)
    text = "".join(verifier._token_bytes[token].decode(errors="replace") for token in ids)
    return msgspec.structs.replace(job, logprobs=comparison.logprobs, text=text)


def test_verifier_accepts_what_is_right_and_any_beginning_of_it(right: Job) -> None:
    verifier = Verifier()
    assert verifier.check(right) == Verdict(4, 6, (), ())
    cut = msgspec.structs.replace(right, token_ids=right.token_ids[:3], logprobs=right.logprobs[:3], text="", reason="")
    assert verifier.check(cut) == Verdict(4, 3, (), ())


@pytest.mark.parametrize(("fault", "sentence"), [
    (lambda job: {"token_ids": (*job.token_ids[:4], (job.token_ids[4] + 1) % 4000, job.token_ids[5])}, "output token 4"),
    (lambda job: {"token_ids": job.token_ids[1:], "logprobs": job.logprobs[1:]}, "output token 0"),
    (lambda job: {"token_ids": (*job.token_ids[:2], *job.token_ids[1:5])}, "output token 2"),
    (lambda job: {"logprobs": (*job.logprobs[:2], job.logprobs[2] - 0.01, *job.logprobs[3:])}, "logprob of output token 2"),
    (lambda job: {"logprobs": job.logprobs[:-1]}, "6 tokens came with 5 logprobs"),
    (lambda job: {"text": job.text + "x"}, "the text is"),
    (lambda job: {"reason": "STOP"}, "it ended with STOP"),
    (lambda job: {"token_ids": job.token_ids[:5], "logprobs": job.logprobs[:5]}, "LENGTH after 5 of 6"),
])  # fmt: skip
def test_verifier_finds(right: Job, fault, sentence: str) -> None:
    wrong = Verifier().check(msgspec.structs.replace(right, **fault(right))).wrong
    assert any(sentence in each for each in wrong), wrong


def outcome(number: int, fate: str = "completed", began: float = 0.0, ended: float = 10.0, num_tokens: int = 70, **fields) -> Outcome:
    draw = Draw(Template(PROMPT, PARAMS), "")
    usage = generation_pb2.Usage(prompt_tokens=len(PROMPT), completion_tokens=num_tokens)
    finished = generation_pb2.Finished(reason=common_pb2.LENGTH, usage=usage)
    seen = Seen(0, list(range(num_tokens)), [], "", finished if fate == "completed" else None)
    return Outcome(number, draw, began, fate, ended, choices=[seen], arrivals=[began + 1, ended], **fields)


def findings(*outcomes: Outcome) -> Findings:
    found = Findings(1, 3.0)
    found.outcomes, found.load_s = list(outcomes), 10.0
    found.verdicts = [Verdict(each.number, 70, (), ()) for each in outcomes]
    return found


def only_breach(found: Findings, demand: Demand | None = None) -> str:
    report = found.report(demand or Demand())
    assert f"BREACH: {report.breaches[0]}" in describe(report)
    (breach,) = report.breaches
    return breach


def test_a_clean_run_has_no_breach() -> None:
    report = findings(*(outcome(number) for number in range(10))).report(Demand())
    assert report.breaches == () and report.completed_share == 1.0 and report.requests["long"] == 10
    assert "no breach" in describe(report)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


def test_share_counts_neither_the_vanished_nor_those_without_a_pool() -> None:
    rest = [outcome(number) for number in range(98)]
    found = findings(*rest, outcome(98, "vanished"), outcome(99, "failed", began=20.0, ended=25.0, error="x"))
    assert "only 98.99%" in only_breach(found)
    found.unserved = [(24.0, 30.0)]
    assert found.report(Demand()).completed_share == 1.0 and not found.report(Demand()).breaches


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda found: found.verdicts.append(Verdict(3, 70, (), ("output token 3 is 5",))), "request 3: output token 3 is 5"),
    (lambda found: found.verdicts.append(Verdict(3, 70, (1, 2), ())), "2 of 210 tokens had to be excused, but at most 1 may"),
    (lambda found: setattr(found, "num_unverified", 2), "2 streams were not compared"),
    (lambda found: found.leaked.update(abc="decode: 3 of 40 pages"), "abc: decode: 3 of 40 pages"),
    (lambda found: found.hung.append("decode-4"), "decode-4 did not end"),
    (lambda found: found.fired.append(Fired("drain", "decode", "decode", 1.0, breach="decode had not left")), "decode had not left"),
    (lambda found: found.outcomes[1].choices[0].token_ids.pop(), "usage is (41, 70), but (41, 69) came"),
    (lambda found: found.outcomes[0].cut_short.append(Seen(0, [5, 6])), "were not repeated"),
])  # fmt: skip
def test_breaches(change, sentence: str) -> None:
    found = findings(outcome(1), outcome(2))
    change(found)
    assert sentence in only_breach(found)


def test_hung_and_silent_streams_are_breaches() -> None:
    many = [outcome(number) for number in range(300)]
    assert "request 300 hung: silent" in only_breach(findings(*many, outcome(300, "hung", error="silent for 90 s")))
    failed = outcome(300, "failed", error="the stream ended in OK without its last message")
    assert "failed without a word" in only_breach(findings(*many, failed))


def test_engines_that_end_by_themselves_are_breaches(tmp_path: Path) -> None:
    stage = Stage(tmp_path, print)
    lines = [f'{{"message": "rank 0 (instance ab12) is down, exit code {code}"}}' for code in (-9, -6, 0, 1, -6, None)]
    (tmp_path / "decode-6.log").write_text("\n".join(lines))
    found = findings(outcome(1))
    found.crashes += stage.crashes()
    report = found.report(Demand())
    assert report.crashes == {"decode-6's engine ended with exit code -6": 2, "decode-6's engine ended with exit code 1": 1}
    assert "decode-6's engine ended with exit code -6 by itself, 2 times" in report.breaches


def test_demands() -> None:
    assert demand_of(30) == Demand(20, 20, 1500) and demand_of(3) == Demand(1, 1, 0) and demand_of(1) == Demand()
    found = findings(outcome(1))
    found.fired = [Fired(kind, "v", "t", 1.0) for kind in KINDS[1:]]
    kinds = generation_pb2.Recovery
    recoveries = [kinds(path=kinds.MOVE, us=5), kinds(path=kinds.REPLAY, us=9), kinds(path=kinds.REDIRECT)]  # the last one brought no token
    found.outcomes[0].choices[0].finished.timeline.recoveries.extend(recoveries)
    breaches = found.report(Demand(1, 1, 2)).breaches
    assert [breach.split(" was")[0].split(" struck")[0] for breach in breaches] == [
        KINDS[0], "path REDIRECT", "1 requests of 64 tokens and more completed, but 2 were asked for"]


def test_recovery_is_from_the_fault_to_the_next_token_of_the_streams_it_hit() -> None:
    timeline = generation_pb2.Timeline(num_retries=1)
    hit, spared = outcome(1, began=0.0, ended=10.0), outcome(2, began=0.0, ended=10.0)
    hit.arrivals, spared.arrivals = [1.0, 2.0, 7.5, 8.0], [1.0, 9.0]
    hit.choices[0].finished.timeline.CopyFrom(timeline)
    found = findings(hit, spared)
    found.fired = [Fired("sigkill", "v", "t", 3.0, released=3.0, back=9.0)]
    report = found.report(Demand())
    assert {kind: (spread.number, spread.most) for kind, spread in report.stream_recovery.items()} == {"all": (1, 4.5), "sigkill": (1, 4.5)}
    assert (report.rank_recovery.number, report.rank_recovery.most) == (1, 6.0)


needs_namespaces = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")


@needs_namespaces
def test_a_host_that_is_cut_off_is_reached_again_when_mended() -> None:
    network = Network()
    try:
        host = network.add_host()
        listener = subprocess.Popen([*host.prefix, sys.executable, "-c", LISTENER, host.ip], stdout=subprocess.PIPE)
        try:
            assert listener.stdout is not None and listener.stdout.readline()
            assert connects(host.ip)
            host.cut()
            assert not connects(host.ip)
            host.mend()
            assert wait(lambda: connects(host.ip))
        finally:
            listener.kill()
            listener.wait()
    finally:
        network.close()
    assert f"bc{os.getpid()}" not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


LISTENER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 50100))
print("up", flush=True)
time.sleep(60)
"""


def connects(ip: str) -> bool:
    try:
        socket.create_connection((ip, 50100), timeout=0.5).close()
    except OSError:
        return False
    return True


def wait(condition, patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


@needs_namespaces
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    run = "from services.doctor.chaos.netns import Network\nn = Network(); n.add_host(); print('up', flush=True); input()"
    killed = subprocess.Popen([sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline()
    left = subprocess.Popen(["ip", "netns", "exec", f"bc{killed.pid}n0", "sleep", "600"])
    killed.kill()
    killed.wait()
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"bc{killed.pid}n0" in names
    Network().close()
    names = subprocess.run("ip netns list; ip link", shell=True, capture_output=True, text=True).stdout
    assert f"bc{killed.pid}" not in names
    assert left.wait(10) == -9


def test_rank_control_steers_the_proxy_of_a_rank(tmp_path: Path) -> None:
    """Both ends of the files: what the run writes, the rank reads and answers."""
    control, signals = RankControl(tmp_path / "control0", "decode"), list[tuple[int, int]]()
    assert load_config(None, [control.setting]).faults.control == str(tmp_path / "control0")
    now = itertools.count()
    file = tmp_path / "control0.decode.0.json"
    rank = FaultControl(file, FaultRates(), lambda: next(now), lambda pid, number: signals.append((pid, number)))
    assert rank.rates() is None
    control.arm("fetching", signal.SIGKILL, 5)
    assert rank.rates() == FaultRates() and not control.has_fired()
    rank.reading("peer", [1], of_epochs=True)
    assert not signals
    rank.reading("peer", [1], of_epochs=False)
    assert signals == [(5, signal.SIGKILL)] and control.has_fired()
    control.rates(FaultRates(drop=0.5))
    assert rank.rates() == FaultRates(drop=0.5)
    control.clear()
    assert rank.rates() == FaultRates()
    control.arm("announced_last", signal.SIGSTOP)
    assert not control.has_fired()
