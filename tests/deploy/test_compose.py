"""deploy/compose.yaml for real: built, up, answers over TCP, pools scaled and containers killed under load, down without a trace.

Tests run in order on one cluster. Where no container can run they are skipped, and say why.
"""

import ipaddress
import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.doctor.oracle import Tally, check_stream, demo_reference
from services.model.params import SamplingParams
from tests.deploy.compose_rig import ComposeCluster, Load, NoEngine, run
from tests.e2e.rig import Answer, generate_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
NUM_TOKENS = 120
AT_ONCE = 6


def fields(prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": params.max_tokens, "temperature": params.temperature, "seed": params.seed,
            "ignore_eos": params.ignore_eos}


# Different enough that pages move, few enough that the oracle computes each once.
PROMPTS = [[0, *((31 * salt + 7919 * index) % 4000 + 4 for index in range(40 + 25 * salt))] for salt in range(8)]
PARAMS = [SamplingParams(max_tokens=NUM_TOKENS, temperature=salt % 2 * 0.8, seed=salt, ignore_eos=True) for salt in range(8)]
REQUESTS = [fields(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ComposeCluster]:
    try:
        cluster = ComposeCluster(f"batontest{os.getpid()}")
    except NoEngine as reason:
        pytest.skip(f"no container can run here: {reason}")
    try:
        cluster.compose("build", timeout_s=600)
        cluster.up()
        cluster.wait_for_ranks(1, 1)
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """What the containers said, when a test fails."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(request.getfixturevalue("cluster").logs())


def assert_equal_to_mono(answers: list[tuple[int, Answer]]) -> None:
    tally = Tally()
    for index, answer in answers:
        assert len(answer.token_ids) == NUM_TOKENS, f"request {index} ended after {len(answer.token_ids)} tokens"
        check_stream(demo_reference(), PROMPTS[index], PARAMS[index], answer.token_ids, tally)
    tally.assert_equal()


def devices(cluster: ComposeCluster, container: str) -> dict[str, dict[str, Any]]:
    """Of each network device but lo: its IPv4 address, and bytes received so far."""
    code = ("import json, psutil; io = psutil.net_io_counters(pernic=True); print(json.dumps({name: {'address': next(a.address for a in"
            " entries if a.family == 2), 'received': io[name].bytes_recv} for name, entries in psutil.net_if_addrs().items()"
            " if name != 'lo'}))")
    return json.loads(cluster.inside(container, "python", "-c", code))


def test_pages_go_over_tcp_and_the_kv_network_alone(cluster: ComposeCluster) -> None:
    (decode,) = cluster.containers("decode")
    before = devices(cluster, decode)
    prompt = [0, *range(100, 750)]
    (answer,) = generate_all(cluster.address, [fields(prompt, GREEDY)], at_once=1)
    after = devices(cluster, decode)

    tally = Tally()
    check_stream(demo_reference(), prompt, GREEDY, answer.token_ids, tally)
    tally.assert_equal()
    network = ipaddress.ip_network(cluster.subnet)
    (kv,) = (name for name, device in after.items() if ipaddress.ip_address(device["address"]) in network)
    timeline = answer.end.timeline
    assert timeline.transfer.transport == f"tcp/{kv}"
    assert timeline.transfer.num_pages == 11
    received = {name: after[name]["received"] - before[name]["received"] for name in after}
    control = sum(number for name, number in received.items() if name != kv)
    assert received[kv] > timeline.transfer.num_bytes > 10e6
    assert control < timeline.transfer.num_bytes / 20, f"{received} with {kv} for pages"
    # Both fronts listen everywhere; the router knows where: on the network that it shares with them.
    hosts = [rank.rpartition(":")[0] for rank in (timeline.prefill_rank, timeline.decode_rank)]
    assert hosts[1] in {device["address"] for name, device in after.items() if name != kv}
    assert all(ipaddress.ip_address(host) not in network for host in hosts)


def test_the_router_follows_what_ranks_publish_beyond_loopback(cluster: ComposeCluster) -> None:
    """KV events, under CURVE by the key pair that the service `keys` made: the pages of one prompt are at both ranks."""
    (router,) = cluster.containers("router")
    read = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9400/metrics').read().decode())"

    def num_pages() -> float:
        return next(sample.value for family in text_string_to_metric_families(cluster.inside(router, "python", "-c", read))
                    for sample in family.samples if sample.name == "baton_prefix_index_pages" and sample.labels["source"] == "events")

    before = num_pages()
    generate_all(cluster.address, [fields([0, *range(2000, 2300)], GREEDY)], at_once=1)
    cluster.wait_for(lambda: num_pages() >= before + 8, "four full pages at each of two ranks", 20.0)


def test_containers_can_do_little(cluster: ComposeCluster) -> None:
    published: list[str] = []
    for container in cluster.containers():
        facts = json.loads(run("docker", "inspect", container))[0]
        host = facts["HostConfig"]
        assert (host["ReadonlyRootfs"], host["Privileged"], host["CapDrop"]) == (True, False, ["ALL"])
        assert host["IpcMode"] == "private" and host["PidMode"] == ""
        published += [f"{entry['HostIp']}:{entry['HostPort']}" for entries in (host["PortBindings"] or {}).values() for entry in entries]
        status = dict(line.split(":\t", 1) for line in cluster.inside(container, "cat", "/proc/self/status").splitlines() if ":\t" in line)
        assert status["Uid"].split() == ["10001"] * 4
        assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")
        assert not cluster.inside(container, "bash", "-c", "command -v gcc cc c++ make uv /opt/baton/bin/pip || true").strip()
    assert published == [cluster.address]


def test_all_become_healthy(cluster: ComposeCluster) -> None:
    def health() -> set[str]:
        return {json.loads(run("docker", "inspect", each))[0]["State"]["Health"]["Status"] for each in cluster.containers()}

    cluster.wait_for(lambda: health() == {"healthy"}, "all are healthy", 30.0)


def test_the_image_says_what_it_can_start(cluster: ComposeCluster) -> None:
    assert "services.router" in run("docker", "run", "--rm", "baton:test")
    (router,) = cluster.containers("router")
    done = subprocess.run(["docker", "exec", router, "bash", "deploy/healthcheck.sh", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and "404" in done.stdout


def test_decode_scales_1_3_1_under_load_without_a_failed_stream(cluster: ComposeCluster) -> None:
    with Load(cluster.address, REQUESTS, AT_ONCE) as load:
        load.wait_for(AT_ONCE)
        cluster.up(decode=3)
        cluster.wait_for_ranks(1, 3)
        load.wait_for(3 * AT_ONCE)
        cluster.up(decode=1)  # returns when two have drained
        assert len(cluster.containers("decode")) == 1
        cluster.wait_for_ranks(1, 1)
        load.wait_for(AT_ONCE)
    assert not load.failures
    assert len({answer.end.timeline.decode_rank for _, answer in load.answers}) == 3, "not all three were used"
    assert all(answer.end.timeline.transfer.transport.startswith("tcp/") for _, answer in load.answers)
    assert_equal_to_mono(load.answers)


def test_streams_go_on_when_containers_are_killed(cluster: ComposeCluster) -> None:
    cluster.up(prefill=2, decode=2)
    cluster.wait_for_ranks(2, 2)
    with Load(cluster.address, REQUESTS, AT_ONCE) as load:
        load.wait_for(AT_ONCE)
        run("docker", "kill", cluster.containers("decode")[0])
        cluster.wait_for(lambda: cluster.num_ranks("decode") == 1, "the router has noticed")
        load.wait_for(AT_ONCE)
        run("docker", "kill", cluster.containers("prefill")[0])
        load.wait_for(2 * AT_ONCE)
    assert not load.failures
    recovered = [recovery for _, answer in load.answers for recovery in answer.end.timeline.recoveries]
    assert recovered, "the load was not touched"
    assert_equal_to_mono(load.answers)


def test_down_leaves_nothing(cluster: ComposeCluster) -> None:
    cluster.down()
    assert not cluster.leftovers()
