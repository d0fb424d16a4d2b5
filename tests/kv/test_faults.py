"""The fault proxy: each fault alone, the contract of a transport under every plan, and the file that steers it."""

import json
import os
import signal

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from proto.baton.v1 import common_pb2
from services.kv.fault_control import LOOK_S, FaultControl, fault_plan
from services.kv.faults import FaultPlan, FaultTransport
from services.kv.lease import LeaseEnded
from services.kv.local_transport import LocalFabric, LocalTransport
from services.kv.memory import KvMemory
from services.kv.messages import HandoffState, Renew, RequestKey, encode
from services.kv.pull import PullState
from services.kv.puller import PullEnded
from services.kv.rank_kv import open_rank_kv
from services.kv.transport import TransferState
from services.runtime.config import FaultRates, FaultsSection, load_config
from services.runtime.errors import HandoffError
from tests.kv.rig import LAYOUT, STATE, Clock, Pair, compatible, request

KEY = RequestKey("r", 0, 0)


class Faulty:
    """Rank "a" with faults, rank "b" without."""

    def __init__(self, watch=None, **rates: float) -> None:
        self.clock = Clock()
        self.fabric = LocalFabric()
        self.plan = FaultPlan(FaultRates(**rates), "seed", watch, self.clock)
        self.memories = [KvMemory(LAYOUT, 4) for _ in range(2)]
        self.a = FaultTransport(LocalTransport("a", self.memories[0], compatible(), self.fabric), self.plan)
        self.b = LocalTransport("b", self.memories[1], compatible(), self.fabric)
        self.memories[1].page_bytes_view()[:] = 7
        self.a.add_peer(self.b.metadata())

    def heard(self) -> list[bytes]:
        self.a.notifications()
        return [payload for _, payload in self.b.notifications()]

    def landed(self, page: int = 0) -> bool:
        return bool((self.memories[0].page_bytes_view()[page] == 7).all())


def test_messages_are_dropped_and_look_sent():
    faulty = Faulty(drop=1.0)
    assert faulty.a.notify("b", b"1") and faulty.heard() == [] and faulty.plan.num_injected == {"drop": 1}
    assert not faulty.a.notify("nobody", b"1"), "what cannot be sent does not look sent"


def test_messages_are_duplicated():
    faulty = Faulty(duplicate=1.0)
    assert faulty.a.notify("b", b"1") and faulty.heard() == [b"1", b"1"]


def test_messages_are_delayed():
    faulty = Faulty(delay=1.0, delay_s=0.5)
    faulty.a.notify("b", b"1")
    assert faulty.heard() == []
    faulty.clock.now += 0.5
    assert faulty.heard() == [b"1"] and faulty.heard() == []


def test_messages_are_reordered_or_go_alone_after_a_while():
    faulty = Faulty(reorder=1.0, delay_s=0.5)
    faulty.a.notify("b", b"1")
    faulty.a.notify("b", b"2")
    assert faulty.heard() == [b"2", b"1"]
    faulty.a.notify("b", b"3")
    assert faulty.heard() == []
    faulty.clock.now += 0.5
    assert faulty.heard() == [b"3"]


@pytest.mark.parametrize("of_epochs", [False, True])
def test_reads_fail_when_posted_and_nothing_moves(of_epochs):
    faulty = Faulty(fail_post=1.0)
    with pytest.raises(HandoffError) as refused:
        (faulty.a.read_epochs if of_epochs else faulty.a.read_pages)("b", [0], [0])
    assert refused.value.reason == common_pb2.READ_FAILED and not faulty.landed() and not faulty.a._reads


def test_reads_fail_in_the_end_after_they_have_ended_below():
    faulty = Faulty(fail_read=1.0)
    faulty.fabric.hold_reads = True
    handle = faulty.a.read_pages("b", [0], [0])
    assert faulty.a.poll(handle) is TransferState.RUNNING, "never FAILED while bytes may still land"
    faulty.fabric.reads[0].complete()
    assert faulty.a.poll(handle) is TransferState.FAILED and faulty.landed()
    faulty.a.release(handle)
    assert not faulty.fabric.reads


def test_reads_stall_after_they_have_landed():
    faulty = Faulty(stall=1.0, stall_s=2.0)
    faulty.fabric.hold_reads = True
    handle = faulty.a.read_pages("b", [1], [0])
    faulty.fabric.reads[0].complete()
    assert faulty.landed() and faulty.a.poll(handle) is TransferState.RUNNING
    faulty.clock.now += 2.0
    assert faulty.a.poll(handle) is TransferState.DONE


def test_late_reads_land_late_even_from_a_peer_that_was_closed():
    faulty = Faulty(late=1.0, stall_s=9.0)
    handle = faulty.a.read_pages("b", [0], [0])
    faulty.a.close_peer("b")
    assert not faulty.a.has_peer("b") and faulty.a.poll(handle) is TransferState.RUNNING and not faulty.landed()
    with pytest.raises(HandoffError, match="late"):
        faulty.a.add_peer(faulty.b.metadata())
    with pytest.raises(HandoffError):
        faulty.a.read_pages("b", [1], [1])
    faulty.clock.now += 9.0
    assert faulty.a.poll(handle) is TransferState.DONE and faulty.landed()
    faulty.a.release(handle)
    assert faulty.a.add_peer(faulty.b.metadata()) == "b"


def test_a_closed_proxy_is_a_fence_too():
    faulty = Faulty(late=1.0, delay=1.0, stall_s=9.0)
    faulty.a.read_pages("b", [0], [0])
    faulty.a.notify("b", b"1")
    faulty.a.close()
    faulty.clock.now += 9.0
    assert not faulty.landed() and not faulty.b.notifications()


def test_a_plan_repeats_by_its_seed():
    def drawn(text: str) -> list[bool]:
        plan = FaultPlan(FaultRates(drop=0.5), text)
        return [plan.strikes("drop") for _ in range(64)]

    assert drawn("1/decode/0") == drawn("1/decode/0") != drawn("1/decode/1")


def test_faults_are_off_unless_asked_for(caplog, tmp_path):
    assert fault_plan(FaultsSection(), "decode", 0) is None and not caplog.records
    section = load_config(None, ["faults.rates={drop=0.25, stall_s=3.0}", "faults.seed=9"]).faults
    plan = fault_plan(section, "decode", 0)
    assert plan is not None and plan.rates.drop == 0.25 and "on purpose" in caplog.text
    assert fault_plan(FaultsSection(control=str(tmp_path / "c")), "prefill", 1) is not None
    kv = open_rank_kv(layout=LAYOUT, num_pages=2, transport="local", compatibility=compatible(), fabric=LocalFabric(), faults=plan)
    assert isinstance(kv.transport, FaultTransport)
    kv.renew_agent()
    assert isinstance(kv.transport, FaultTransport), "a renewed agent has the same faults"


# ---- the file that steers


class Steered:
    def __init__(self, tmp_path) -> None:
        self.path = tmp_path / "c.decode.0.json"
        self.signals: list[tuple[int, int]] = []
        self.clock = Clock()
        self.control = FaultControl(self.path, FaultRates(drop=0.5), self.clock, self._send_signal)

    def _send_signal(self, pid: int, number: int) -> None:
        assert self.fired is not None, "told before the signal"
        self.signals.append((pid, number))

    def write(self, table: dict) -> FaultRates | None:
        self.path.write_text(json.dumps(table))
        self.clock.now += 2 * LOOK_S
        os.utime(self.path, ns=(int(self.clock.now * 1e9),) * 2)
        return self.control.rates()

    @property
    def fired(self) -> dict | None:
        path = self.path.with_suffix(".fired")
        return json.loads(path.read_text()) if path.exists() else None


def test_rates_change_at_run_time(tmp_path):
    steered = Steered(tmp_path)
    assert steered.control.rates() is None
    assert steered.write({"rates": {"delay": 1.0}}) == FaultRates(delay=1.0)
    assert steered.control.rates() is None
    assert steered.write({}) == FaultRates(drop=0.5), "without rates those of the configuration"
    assert steered.write({"rates": {"no_such": 1.0}}) is None
    assert steered.write({"rates": {"drop": 0.0}}) == FaultRates()


@pytest.mark.parametrize("moment", ["fetching", "verifying", "announced_last", "paused_announce"])
@pytest.mark.parametrize("side", ["reader", "holder"])
def test_an_armed_signal_fires_once_at_its_moment(tmp_path, moment, side):
    steered = Steered(tmp_path)
    pair = Pair()
    moved = HandoffState(first_token=1, output_ids=(4, 5), num_output_tokens=3, num_prompt_tokens=300)
    kv = pair.reader if side == "reader" else pair.holder
    plan = FaultPlan(FaultRates(), "seed", steered.control, pair.clock)
    kv.transport = FaultTransport(kv.transport, plan)
    kv.exchange = kv._new_exchange()
    pid = 4242 if side == "reader" else 0
    steered.write({"arm": {"on": moment, "signal": int(signal.SIGSTOP), "pid": pid}})
    for number in range(2):
        key = pair.key()
        source = pair.compute(key, 2)
        pair.claim(key, 2)
        pair.holder.leases.announce(key, [(0, source[0])])
        pair.tick()
        assert number or len(steered.signals) == (moment == "fetching" and side == "reader"), "only reads of the first part by now"
        pair.holder.leases.announce(key, [(1, source[1])], moved if moment == "paused_announce" else STATE)
        pair.tick()
        pair.reader.pool.release(request(key))
    expected = side == "reader" or moment in ("announced_last", "paused_announce")
    assert steered.signals == ([(pid or os.getpid(), signal.SIGSTOP)] if expected else [])
    if expected:
        assert steered.fired == {"on": moment, "signal": int(signal.SIGSTOP), "pid": pid, "key": ["request0", 0, 0]}


# ---- any plan

RATE = st.sampled_from([0.0, 0.0, 0.2, 0.6])
RATES = st.builds(
    FaultRates, drop=RATE, duplicate=RATE, delay=RATE, reorder=RATE, fail_post=RATE, fail_read=RATE, stall=RATE, late=RATE,
    delay_s=st.sampled_from([0.05, 2.0]), stall_s=st.sampled_from([0.1, 8.0]),
)


@seed(4)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(rates=RATES, plan_seed=st.integers(0, 10_000))
def test_under_any_plan_a_hand_off_is_right_or_fails_typed_and_nothing_leaks(rates, plan_seed):
    pair = Pair()
    for name in ("holder", "reader"):
        kv = getattr(pair, name)
        kv.transport = FaultTransport(kv.transport, FaultPlan(rates, f"{plan_seed}/{name}", None, pair.clock))
        kv.exchange = kv._new_exchange()
    for _ in range(2):
        for ours, theirs in ((pair.reader, pair.holder), (pair.holder, pair.reader)):
            try:
                ours.transport.add_peer(theirs.transport.metadata())
            except HandoffError:
                break  # closed until late reads have ended: the router would choose another
        else:
            hand_over_once(pair)
    pair.pass_time(120.0)
    for kv in pair.ranks:
        if kv.renew_if_due():
            kv.exchange.tick()
    pair.pass_time(40.0)
    pair.assert_all_free()


def hand_over_once(pair):
    key = pair.key()
    source = pair.compute(key, 3)
    try:
        target = pair.claim(key, 3)
    except HandoffError as error:
        assert error.reason in (common_pb2.PEER_GONE, common_pb2.FENCED)
        pair.holder.leases.abort(key, error.reason, str(error))
        pair.holder.pool.release(request(key))
        return
    pair.announce(key, source, chunks=3)
    ended = {}
    until = pair.clock.now + 100.0
    while pair.clock.now < until and key not in ended:
        pair.clock.now += 0.5
        for kv in pair.ranks:
            for event in kv.exchange.tick():
                if isinstance(event, PullEnded):
                    ended[event.key] = event
                elif isinstance(event, LeaseEnded):
                    pair.holder.pool.release(request(event.key))
            kv.check_integrity()
    event = ended[key]
    if event.state is PullState.READY:
        assert pair.arrived(key, target) and event.handoff == STATE
    else:
        assert event.state is PullState.ABORTED and event.reason in (
            common_pb2.READ_FAILED, common_pb2.READ_DEADLINE, common_pb2.LEASE_EXPIRED, common_pb2.PEER_GONE,
        ), event
    pair.reader.pool.release(request(key))


def test_the_proxy_carries_messages_unchanged():
    faulty = Faulty()
    payload = encode(Renew(key=KEY, holder="b", reader="a", next_sequence=0))
    assert faulty.a.notify("b", payload) and faulty.heard() == [payload]
    assert faulty.plan.num_injected == {}
