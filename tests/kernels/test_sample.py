"""The sampler against the CPU's own (`services/model/sampling.py`), token for token, and against formulas by hand."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from kernels.sample import SampleRows, accept_drafts, sample, top_logprobs
from kernels.sample.noise import gumbel_noise_torch, noise_bits, uniform
from kernels.timing import compare_us
from services.model.params import SamplingParams
from services.model.philox import gumbel_noise
from services.model.sampling import RowState
from services.model.sampling import sample as sample_on_cpu
from tests.bench.report import Row
from tests.kernels.builds import Build
from tests.kernels.device import DEVICE, generator, gpu_only, skip_unless_available

BACKENDS = ["triton", "torch", "reference"]
FILTERS = [(k, p, m) for k in (0, 1, 5, 400) for p in (1.0, 0.9, 0.3) for m in (0.0, 0.1)]
EXCUSED = 1e-4  # the two best scores, or a filter's cut, may lie so near that rounding decides


def rows_of(**columns: Any) -> SampleRows:
    """Rows from lists or single values: temperature 1, no filter, seeds 0, 1, 2 ..."""
    n = max(len(value) for value in columns.values() if isinstance(value, (list, range)))
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": range(n), "choice": 0, "position": 10, "active": True}
    dtypes = [torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64, torch.int64, torch.bool]
    made = []
    for (name, default), dtype in zip(defaults.items(), dtypes, strict=True):
        value = columns.get(name, default)
        values = list(value) if isinstance(value, (list, range)) else [value] * n
        if name == "seed":
            values = [seed - 2**64 if seed >= 2**63 else seed for seed in values]
        made.append(torch.tensor(values, dtype=dtype, device=DEVICE))
    return SampleRows(*made)


def states_of(rows: SampleRows) -> list[RowState]:
    """The same rows as the CPU's sampler takes them."""
    columns = [column.tolist() for column in rows if column is not None]
    return [
        RowState(
            params=SamplingParams(max_tokens=1, temperature=t, top_k=k, top_p=p, min_p=m, seed=seed % 2**64),
            position=position, num_output_tokens=0, choice=choice,
        )
        for t, k, p, m, seed, choice, position, *_ in zip(*columns, strict=True)
    ]  # fmt: skip


def assert_same_tokens(got: torch.Tensor, logits: torch.Tensor, rows: SampleRows) -> None:
    """Equal to the CPU's sampler but where rounding may decide."""
    expected = sample_on_cpu(logits.float().cpu(), states_of(rows), return_scores=True)
    assert expected.scores is not None
    for i in (got.cpu() != expected.token_ids).nonzero()[:, 0].tolist():
        gap = float(expected.scores[i].max() - expected.scores[i, got[i]])
        assert gap < EXCUSED or at_a_cut(logits[i].float().cpu(), rows, i, int(got[i])), f"row {i}: {got[i]} {expected.token_ids[i]} {gap=}"


def at_a_cut(x: torch.Tensor, rows: SampleRows, i: int, token: int) -> bool:
    """Whether the mass before the token lies near top_p, or its logit near min_p's bound."""
    scaled = (x / float(rows.temperature[i])).double()
    order = scaled.sort(descending=True, stable=True).indices
    top_k = int(rows.top_k[i])
    order = order[: top_k if top_k > 0 else len(order)]
    before = scaled[order].softmax(0).cumsum(0)
    near_p = float((before - float(rows.top_p[i])).abs().min()) < EXCUSED
    bound = scaled.max() + math.log(max(float(rows.min_p[i]), 1e-300))
    near_k = 0 < top_k < len(scaled) and abs(float(scaled[token] - scaled[order[-1]])) < EXCUSED / 100  # the quotient's rounding
    return near_k or near_p or float((scaled - bound).abs().min()) < EXCUSED


def random_rows(label: str, n: int) -> SampleRows:
    """n rows of differing parameters, every combination of filters among the first 24."""
    options = [FILTERS[i % len(FILTERS)] for i in range(n)]
    temperature = torch.rand(n, generator=generator(label, "cpu")).mul(2).add(0.3).tolist()
    temperature[::7] = [0.0] * len(temperature[::7])
    return rows_of(
        temperature=temperature, top_k=[k for k, _, _ in options], top_p=[p for _, p, _ in options], min_p=[m for _, _, m in options],
        seed=[(2**64 - 1) // (i + 1) for i in range(n)], choice=[i % 3 for i in range(n)], position=[i * i + 5 for i in range(n)],
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("vocab", "coarse"), [(7, True), (301, True), (301, False), pytest.param(4500, False, marks=pytest.mark.slow)], ids=str
)
def test_equals_the_cpu_sampler(backend: str, vocab: int, coarse: bool) -> None:
    skip_unless_available(backend)
    label = f"equals {vocab} {coarse}"
    logits = torch.randn(24, vocab, generator=generator(label), device=DEVICE).mul(3)
    if coarse:
        logits = logits.mul(8).round().div(8)  # many equal values
    rows = random_rows(label, 24)
    assert_same_tokens(sample(logits, rows, backend=backend).token_ids, logits, rows)


@pytest.mark.parametrize("coarse", [True, pytest.param(False, marks=pytest.mark.slow)], ids=str)
def test_several_tiles_and_too_many_candidates(coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available("triton")
    monkeypatch.setattr("kernels.sample._triton.choose_tile", lambda vocab: 256)
    monkeypatch.setattr("kernels.sample._triton.MAX_CANDIDATES", 64)
    logits = torch.randn(24, 450, generator=generator(f"tiles {coarse}"), device=DEVICE).mul(3)
    if coarse:
        logits = logits.mul(8).round().div(8)
    rows = random_rows(f"tiles {coarse}", 24)
    assert_same_tokens(sample(logits, rows, backend="triton").token_ids, logits, rows)


@pytest.mark.timeout(60)
def test_equal_logits_by_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens tie at every cut that the passes bisect: once a cut between ids made them go on for ever."""
    skip_unless_available("triton")
    monkeypatch.setattr("kernels.sample._triton.choose_tile", lambda vocab: 256)
    monkeypatch.setattr("kernels.sample._triton.MAX_CANDIDATES", 64)
    rows = rows_of(temperature=1.3, top_k=[5, 200, 200, 0, 0], top_p=[0.3, 1.0, 0.9, 0.3, 1.0], min_p=[0.0, 1.0, 0.0, 0.1, 1.0])
    logits = torch.zeros(5, 300, device=DEVICE)
    assert_same_tokens(sample(logits, rows, backend="triton").token_ids, logits, rows)


def test_backends_agree_where_greedy_ends() -> None:
    """1e-5 in fp32 is a little less than in double: every backend compares in fp32."""
    skip_unless_available("triton")
    logits = torch.tensor([[0.0, 1e-6, 0.0, 0.0]], device=DEVICE).expand(64, 4).contiguous()
    rows = rows_of(temperature=[1e-5] * 64, top_k=0)._replace(position=torch.arange(64, device=DEVICE))
    tokens = [sample(logits, rows, backend=backend).token_ids.tolist() for backend in BACKENDS]
    assert tokens[0] == tokens[1] == tokens[2] and len(set(tokens[0])) > 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_rows_and_bf16(backend: str) -> None:
    skip_unless_available(backend)
    logits = torch.randn(24, 400, generator=generator("strided"), device=DEVICE).mul(3).to(torch.bfloat16)[:, 8:309]
    rows = random_rows("strided", 24)
    assert_same_tokens(sample(logits, rows, backend=backend).token_ids, logits, rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_does_not_depend_on_its_batch_mates(backend: str) -> None:
    skip_unless_available(backend)
    logits = torch.randn(12, 130, generator=generator("mates"), device=DEVICE).mul(2)
    rows = random_rows("mates", 12)
    together = sample(logits, rows, logprobs=True, backend=backend)
    assert together.logprobs is not None
    for i in (0, 5, 11):
        alone = sample(logits[i : i + 1], SampleRows(*(column[i : i + 1].clone() for column in rows)), logprobs=True, backend=backend)
        assert alone.logprobs is not None
        assert torch.equal(alone.token_ids, together.token_ids[i : i + 1]) and torch.equal(alone.logprobs, together.logprobs[i : i + 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_not_active(backend: str) -> None:
    """Their NaN stays there, their parameters are never used, and they get no token."""
    skip_unless_available(backend)
    logits = torch.randn(8, 130, generator=generator("active"), device=DEVICE)
    clean = sample(logits, random_rows("active", 8), logprobs=True, backend=backend)
    rows = random_rows("active", 8)
    assert rows.active is not None and clean.logprobs is not None
    for i in (1, 6):
        rows.active[i], logits[i], rows.temperature[i], rows.top_k[i], rows.position[i] = False, torch.nan, torch.nan, -5, -1
    got = sample(logits, rows, logprobs=True, backend=backend)
    kept = [0, 2, 3, 4, 5, 7]
    assert got.logprobs is not None and got.token_ids[[1, 6]].tolist() == [-1, -1] and got.logprobs[[1, 6]].isnan().all()
    assert torch.equal(got.token_ids[kept], clean.token_ids[kept]) and torch.equal(got.logprobs[kept], clean.logprobs[kept])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_row_and_gives_some_token(backend: str) -> None:
    skip_unless_available(backend)
    logits = torch.randn(24, 60, generator=generator("nan"), device=DEVICE)
    rows = random_rows("nan", 24)
    clean = sample(logits, rows, backend=backend).token_ids
    broken = [*range(7, 16), 22]
    logits[broken, 17], logits[22] = torch.nan, torch.nan
    got = sample(logits, rows, backend=backend).token_ids
    kept = [i for i in range(24) if i not in broken]
    assert torch.equal(got[kept], clean[kept]) and bool(((got >= 0) & (got < 60)).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_equal_or_infinite_logits(backend: str) -> None:
    """Ties at every cut; a mask that leaves one token; one that leaves none takes the lowest id."""
    skip_unless_available(backend)
    logits = torch.zeros(26, 90, device=DEVICE)
    rows = random_rows("ties", 26)
    logits[24:] = -torch.inf
    logits[24, 33] = 1.0
    got = sample(logits, rows, backend=backend).token_ids
    assert_same_tokens(got[:24], logits[:24], SampleRows(*(column[:24] for column in rows)))
    assert got[24:].tolist() == [33, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_temperatures_0_and_1_in_one_batch_and_top_p(backend: str) -> None:
    """B29; top_p 0.4 of (0.5, 0.3, 0.2) keeps the first token alone; ties take the lowest id."""
    skip_unless_available(backend)
    x = torch.tensor([math.log(p) for p in (0.5, 0.3, 0.2)], device=DEVICE)
    rows = rows_of(temperature=[0.0, 1.0] * 10, top_p=[1.0, 0.4] * 10)
    assert sample(x.expand(20, 3), rows, backend=backend).token_ids.tolist() == [0] * 20
    tied = torch.tensor([[0.0, 2.0, 2.0, 1.0]] * 3, device=DEVICE)
    assert sample(tied, rows_of(temperature=[0.0, 1.5, 1e-9], top_k=[0, 1, 0]), backend=backend).token_ids.tolist() == [1, 1, 1]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (1.0, 3)], ids=str)
def test_shares_are_the_softmax(backend: str, temperature: float, top_k: int) -> None:
    """4 sigma of many seeds: 20,000 on a GPU."""
    skip_unless_available(backend)
    n = 20_000 if DEVICE == "cuda" or backend == "torch" else 30
    x = torch.tensor([math.log(p) for p in (0.5, 0.25, 0.15, 0.1)], device=DEVICE)
    kept = 4 if top_k == 0 else top_k
    expected = x[:kept].div(temperature).softmax(-1).tolist() + [0.0] * (4 - kept)
    tokens = sample(x.expand(n, 4), rows_of(temperature=temperature, top_k=top_k, seed=range(n)), backend=backend).token_ids
    for share, p in zip((tokens.bincount(minlength=4) / n).tolist(), expected, strict=True):
        assert abs(share - p) <= 4 * math.sqrt(p * (1 - p) / n)


def test_noise_is_the_cpus() -> None:
    """Bits equal, noise within 2 ulp: the exact one that decides; the fast one within what `is_near` allows, in its own units."""
    skip_unless_available("triton")
    from kernels.sample._triton_more import noise_triton

    seeds, choices, positions = [0, 2**64 - 1, 0x299F31D0A4093822, 2**63], [0, 2**32 - 1, 7, 1], [0, 2**32 - 1, 131_071, 5]
    num_ids = 129_280 if DEVICE == "cuda" else 3001
    rows = rows_of(seed=seeds, choice=choices, position=positions)
    bits, fast, exact = (part.cpu() for part in noise_triton(rows.seed, rows.choice, rows.position, num_ids))
    on_cpu = SampleRows(*(column.cpu() for column in rows))
    assert torch.equal(bits, noise_bits(on_cpu.seed, on_cpu.choice, on_cpu.position, num_ids)[:, :num_ids])
    expected = gumbel_noise(seeds, choices, positions, num_ids)
    assert torch.equal(expected, gumbel_noise_torch(on_cpu.seed, on_cpu.choice, on_cpu.position, num_ids))
    ulp = torch.finfo(torch.float32).eps * expected.abs().clamp(min=1.0)
    assert bool(((exact - expected).abs() <= 2 * ulp).all())
    assert float((fast - (expected.double() + math.log(math.log(2))) / math.log(2)).abs().max()) < 6e-5


def test_noise_keeps_its_bounds_at_the_extremes() -> None:
    """Bits at both ends and where the series takes over, against fp64."""
    skip_unless_available("triton")
    from kernels.sample._triton_more import noise_of_bits_triton

    ends = [0, 1, 2, 3, 100, 2**26 - 9, 2**26 - 4, 2**26, 2**26 + 4, 2**31, 2714937127, 2**32 - 300, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    bits = torch.cat([torch.tensor(ends), torch.randint(0, 2**32, (5000,), generator=generator("extremes", "cpu"))])
    fast, exact = (part.cpu() for part in noise_of_bits_triton(bits.to(DEVICE)))
    wide = -torch.log(-torch.log1p(-uniform(bits).double()))
    assert float((fast - (wide + math.log(math.log(2))) / math.log(2)).abs().max()) < 6e-5
    assert float((exact - wide).abs().max()) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_logprobs_are_raw(backend: str) -> None:
    skip_unless_available(backend)
    logits = torch.randn(8, 301, generator=generator("logprobs"), device=DEVICE).mul(4)
    got = sample(logits, random_rows("logprobs", 8), logprobs=True, backend=backend)
    assert got.logprobs is not None
    expected = logits.double().log_softmax(-1).gather(1, got.token_ids[:, None])[:, 0]
    assert torch.allclose(got.logprobs.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("vocab", "num_top"), [(7, 7), (150, 20)], ids=str)
def test_top_logprobs(backend: str, vocab: int, num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_available(backend)
    if backend == "triton":
        monkeypatch.setattr("kernels.sample._triton_more.TILE", 64)  # several tiles a row
    logits = torch.randn(5, vocab, generator=generator(f"top {vocab}"), device=DEVICE).mul(4).round().div(2)  # many equal values
    active = torch.tensor([True, True, False, True, True], device=DEVICE)
    logits[2] = torch.nan
    ids, values = top_logprobs(logits, num_top, active=active, backend=backend)
    for i in (0, 1, 3, 4):
        expected = sorted(range(vocab), key=lambda token: (-float(logits[i, token]), token))[:num_top]
        assert ids[i].tolist() == expected
        assert torch.allclose(values[i].double(), logits[i].double().log_softmax(-1)[expected], atol=1e-5, rtol=1e-5)
    assert ids[2].tolist() == [-1] * num_top and values[2].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_accept_drafts(backend: str) -> None:
    skip_unless_available(backend)
    drafts = torch.tensor([[5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 7], [5, 6, 7], [9, 9, 9]], device=DEVICE)
    targets = torch.tensor([[5, 6, 7, 8]] * 6, device=DEVICE)
    num_accepted, ids = accept_drafts(drafts, targets, torch.tensor([3, 3, 3, 2, 0, -1], device=DEVICE), backend=backend)
    assert num_accepted.tolist() == [3, 1, 0, 2, 0, 0]
    assert ids.tolist() == [[5, 6, 7, 8], [5, 6, -1, -1], [5, -1, -1, -1], [5, 6, 7, -1], [5, -1, -1, -1], [-1] * 4]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_accept_drafts_on_random_requests(backend: str) -> None:
    skip_unless_available(backend)
    for k in (1, 2, 3, 5):
        drafts, targets = (torch.randint(0, 2, (70, n), generator=generator(f"accept {k} {n}"), device=DEVICE) for n in (k, k + 1))
        num_drafts = torch.randint(-1, k + 1, (70,), generator=generator(f"drafts {k}"), device=DEVICE)
        got, expected = (accept_drafts(drafts, targets, num_drafts, backend=name) for name in (backend, "reference"))
        assert torch.equal(got.num_accepted, expected.num_accepted) and torch.equal(got.token_ids, expected.token_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows(backend: str) -> None:
    skip_unless_available(backend)
    empty = SampleRows(*(column[:0] for column in rows_of(top_k=[0])))
    got = sample(torch.zeros(0, 9, device=DEVICE), empty, logprobs=True, backend=backend)
    assert got.token_ids.shape == (0,) and got.logprobs is not None and got.logprobs.shape == (0,)
    assert top_logprobs(torch.zeros(0, 9, device=DEVICE), 3, backend=backend)[0].shape == (0, 3)
    drafts = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    assert accept_drafts(drafts, torch.zeros_like(drafts[:, :1]).expand(0, 3).contiguous(), drafts[:, 0].contiguous(), backend=backend)[
        0
    ].shape == (0,)


def test_rejects_wrong_inputs() -> None:
    with pytest.raises(AssertionError):
        sample(torch.zeros(2, 8).T, rows_of(top_k=[0] * 8))
    with pytest.raises(AssertionError):
        sample(torch.zeros(3, 8), rows_of(top_k=[0, 0]))
    with pytest.raises(AssertionError):
        top_logprobs(torch.zeros(2, 8), 21)
    with pytest.raises(AssertionError):
        accept_drafts(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


@gpu_only
@pytest.mark.skipif(DEVICE == "cpu", reason="real sizes need a GPU")
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0])
def test_whole_vocabulary_on_a_gpu(scale: float) -> None:
    """129,280 ids, all filters; scale 0: rows of equal logits."""
    logits = torch.randn(48, 129_280, generator=generator(f"whole {scale}"), device=DEVICE).mul(scale)
    rows = random_rows(f"whole {scale}", 48)
    assert_same_tokens(sample(logits, rows, backend="triton").token_ids, logits, rows)


@gpu_only
@pytest.mark.skipif(DEVICE == "cpu", reason="17 GB")
def test_offsets_beyond_2_31_on_a_gpu() -> None:
    num_rows, vocab = 33_300, 129_280  # 4.3e9 elements
    rows = rows_of(temperature=[0.0, 1.0, 1.0, 1.0] * (num_rows // 4), top_k=[0, 0, 9, 0] * (num_rows // 4), top_p=0.5)
    rows = rows._replace(active=torch.arange(num_rows, device=DEVICE) >= num_rows - 8)
    logits = torch.empty(num_rows, vocab, device=DEVICE, dtype=torch.bfloat16)
    logits[-8:] = torch.randn(8, vocab, generator=generator("beyond"), device=DEVICE).mul(3)
    got = sample(logits, rows, logprobs=True, backend="triton")
    tail = SampleRows(*(column[-8:].clone() for column in rows))
    assert_same_tokens(got.token_ids[-8:], logits[-8:], tail)
    assert torch.equal(top_logprobs(logits, 3, backend="triton")[0][-8:], top_logprobs(logits[-8:], 3, backend="torch")[0])


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_offsets_beyond_2_31(backend: str) -> None:
    """A row stride of 2^31: virtual memory of which two rows are touched."""
    skip_unless_available(backend)
    if DEVICE == "cuda":
        pytest.skip("really large logits are tested there")
    logits = torch.empty(2, 2**31, dtype=torch.float32)[:, :100]
    logits.copy_(torch.randn(2, 100, generator=generator("stride")))
    rows = rows_of(temperature=[0.0, 1.0], top_k=[0, 9])
    assert torch.equal(sample(logits, rows, backend=backend).token_ids, sample(logits.clone(), rows, backend="reference").token_ids)


def test_filters_can_be_captured_in_a_graph_on_a_gpu() -> None:
    if DEVICE == "cpu":
        pytest.skip("no graphs on cpu")
    logits = torch.randn(24, 5000, generator=generator("graph"), device=DEVICE).mul(3)
    rows = random_rows("graph", 24)
    sample(logits, rows, logprobs=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(logits, rows, logprobs=True)
    logits.copy_(torch.randn(24, 5000, generator=generator("graph 2"), device=DEVICE).mul(3))
    rows.position.add_(1)
    rows.top_k.copy_(rows.top_k.flip(0))
    graph.replay()
    assert torch.equal(captured.token_ids, sample(logits, rows).token_ids)


def bench_sample() -> Iterator[Row]:
    """256 rows of DeepSeek's vocabulary; FlashInfer draws other tokens by the same rules, and breaks ties as they come."""
    import flashinfer.sampling as peer

    build = Build(peer.get_sampling_module)
    num_rows, vocab = 256, 129_280
    flat = [torch.randn(num_rows, vocab, generator=generator(f"bench {i}"), device=DEVICE).mul(3) for i in range(3)]
    peaked = [2 * logits for logits in flat]  # as models' are: some ten tokens hold most of the mass
    kinds = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top-p": (1.0, 0, 0.9), "top-k-top-p": (1.0, 50, 0.95)}
    rows = {name: rows_of(temperature=[t] * num_rows, top_k=k, top_p=p) for name, (t, k, p) in kinds.items()}
    for columns in rows.values():
        few = SampleRows(*(column[:8].clone() for column in columns))
        for sets in (flat, peaked):
            assert_same_tokens(sample(sets[0], columns).token_ids[:8], sets[0][:8], few)
    ours = {name: [partial(sample, logits, columns) for logits in peaked] for name, columns in rows.items()}
    libraries = {"greedy": ("torch.argmax", [partial(torch.argmax, logits, -1) for logits in peaked])}
    drawn = {"seed": 1, "offset": 0}
    theirs = {
        "plain": lambda logits: peer.sampling_from_logits(logits, **drawn),
        "top-k-top-p": lambda logits: peer.top_k_top_p_sampling_from_logits(logits, 50, 0.95, **drawn),
        "top-p": lambda logits: peer.top_p_sampling_from_probs(peer.softmax(logits), 0.9, **drawn),
    }
    if build.is_there(lambda: [call(peaked[0]) for call in theirs.values()]):
        libraries |= {name: ("FlashInfer", [partial(call, logits) for logits in peaked]) for name, call in theirs.items()}
    floor = num_rows * vocab * 4 / 4.3e6
    for name, calls in ours.items():
        if name in libraries:
            library, others = libraries[name]
            times = compare_us({"ours": calls, "theirs": others}, replays=20)
            conditions = (
                f"{library} {times['theirs']:.1f} us, ours {times['ours']:.1f}, floor {floor:.1f}; 256 x 129280 fp32, logits 6 * randn"
            )
            yield Row(f"K9-sample-{name}", times["theirs"] / times["ours"], "x", "higher", 0.9, 1.0, conditions)
        else:
            conditions = f"floor {floor:.1f} us; 256 x 129280 fp32, logits 6 * randn"
            yield Row(f"sample-{name}", compare_us({"": calls}, replays=20)[""], "us", "lower", None, None, conditions)
    times = compare_us({name: [partial(sample, logits, rows[name]) for logits in flat] for name in ("top-p", "top-k-top-p")}, replays=20)
    for name, time in times.items():
        conditions = f"floor {floor:.1f} us; 256 x 129280 fp32, logits 3 * randn: thousands of tokens hold 0.9 of the mass"
        yield Row(f"sample-{name}-flat", time, "us", "lower", None, None, conditions)
