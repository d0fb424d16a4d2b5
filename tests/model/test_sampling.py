"""The sampler's values by hand, its independence of batch mates bit for bit, and its noise."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sample.noise import philox4x32, uniform
from services.model.params import SamplingParams
from services.model.penalties import PenaltyState
from services.model.philox import gumbel_noise, noise_bits
from services.model.sampling import RowState, Sampled, adjust_logits, sample

VOCAB = 301  # odd: rows do not end where vectors do


def row(position: int = 10, num_output: int = 0, penalties: PenaltyState | None = None, choice: int = 0, **params: object) -> RowState:
    defaults: dict[str, object] = {"max_tokens": 16, "seed": 1}
    return RowState(
        params=SamplingParams(**defaults | params),  # type: ignore[arg-type]
        position=position, num_output_tokens=num_output, eos_token_ids=(1,), choice=choice, penalties=penalties,
    )  # fmt: skip


def draw(logits: list[float], num_draws: int, **params: object) -> list[float]:
    """Share of each token over `num_draws` seeds."""
    rows = [row(seed=seed, **params) for seed in range(num_draws)]
    token_ids = sample(torch.tensor([logits]).expand(num_draws, -1).contiguous(), rows).token_ids
    return (token_ids.bincount(minlength=len(logits)) / num_draws).tolist()


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(key: tuple[int, int], counter: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32((torch.tensor(key[0]), torch.tensor(key[1])), tuple(torch.tensor(word) for word in counter))
    assert tuple(int(word) for word in words) == expected


def plain_philox(key: list[int], counter: list[int]) -> list[int]:
    """Python's own integers, written down once more."""
    for _ in range(10):
        low, high = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [(high >> 32) ^ counter[1] ^ key[0], high & 0xFFFFFFFF, (low >> 32) ^ counter[3] ^ key[1], low & 0xFFFFFFFF]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 127), position=st.integers(0, 2**32 - 1), token=st.integers(0, VOCAB - 1))
def test_noise_layout(seed: int, choice: int, position: int, token: int) -> None:
    bits = noise_bits([seed], [choice], [position], VOCAB)[0, token]
    assert int(bits) == plain_philox([seed & 0xFFFFFFFF, seed >> 32], [token // 4, position, choice, 0])[token % 4]


def test_uniform_is_open_and_gumbel_finite() -> None:
    ends = uniform(torch.tensor([0, 1, 2**24, 2**31, 2**32 - 129, 2**32 - 1]))
    assert ends.tolist() == [2.0**-33, 1.5 * 2.0**-32, 2.0**-8, 0.5, 1 - 2.0**-24, 1 - 2.0**-24]
    noise = gumbel_noise(list(range(64)), [0] * 64, [5] * 64, 4096)
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.01) and float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_noise_depends_on_every_key_and_on_nothing_else() -> None:
    base = gumbel_noise([2**63 + 1], [0], [7], VOCAB)
    for other in (([2**63 + 2], [0], [7]), ([1], [0], [7]), ([2**63 + 1], [1], [7]), ([2**63 + 1], [0], [8])):
        assert float((gumbel_noise(*other, VOCAB) == base).float().mean()) < 0.01
    assert torch.equal(gumbel_noise([2**63 + 1], [0], [7], 4 * VOCAB)[:, :VOCAB], base)


def mixed_rows() -> list[RowState]:
    """16 rows of all kinds."""
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.8, "logprobs": 0},
        {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.05},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": -0.4, "min_tokens": 3},
    ]
    return [
        row(position=20 + i, num_output=i % 4, seed=2**40 * i + 9, penalties=PenaltyState([1, 2, 3], [4, 4]), **kinds[i % len(kinds)])
        for i in range(16)
    ]


def same(a: Sampled, b: Sampled, i: int, j: int) -> bool:
    assert a.scores is not None and b.scores is not None
    return int(a.token_ids[i]) == int(b.token_ids[j]) and torch.equal(a.scores[i], b.scores[j])


def test_a_row_does_not_depend_on_its_batch_mates_bit_for_bit() -> None:
    rows, logits = mixed_rows(), 3 * torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(1))
    before, together = logits.clone(), sample(logits, rows, return_scores=True)
    assert torch.equal(logits, before), "the caller's logits were written to"
    order = torch.randperm(16, generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = sample(logits[order], [rows[i] for i in order], return_scores=True)
    for i in range(16):
        alone = sample(logits[i : i + 1], rows[i : i + 1], return_scores=True)
        assert same(alone, together, 0, i) and same(shuffled, together, order.index(i), i), i
        if rows[i].params.logprobs >= 0:
            assert alone.logprobs is not None and together.logprobs is not None
            assert float(alone.logprobs[0]) == float(together.logprobs[i])


def test_nan_stays_in_its_row() -> None:
    rows, logits = mixed_rows(), torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(3))
    clean = sample(logits, rows).token_ids
    logits[5] = torch.nan
    others = [i for i in range(16) if i != 5]
    assert torch.equal(sample(logits, rows).token_ids[others], clean[others])


def brute_kept(x: torch.Tensor, params: SamplingParams) -> set[int]:
    """Which tokens stay, one at a time."""
    order = sorted(range(len(x)), key=lambda i: (-float(x[i]), i))[: params.top_k or None]
    probs = x[order].double().softmax(-1).tolist()
    kept, total = list[int](), 0.0
    for token, p in zip(order, probs, strict=True):
        if total >= params.top_p and params.top_p < 1:
            break
        kept.append(token)
        total += p
    best = probs[0]
    return {token for token, p in zip(kept, probs, strict=False) if p >= params.min_p * best}


@pytest.mark.parametrize("vocab", [7, 300, 1500])
def test_filters_equal_a_brute_loop(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(24, vocab, generator=generator).mul(2).mul(8).round().div(8)  # many equal values
    options = [(k, p, m) for k in (0, 1, 5, 400) for p in (1.0, 0.9, 0.3) for m in (0.0, 0.1)]
    rows = [row(temperature=1.0, top_k=k, top_p=p, min_p=m, seed=i) for i, (k, p, m) in enumerate(options)]
    scores = sample(logits, rows, return_scores=True).scores
    assert scores is not None
    for i, state in enumerate(rows):
        assert set(scores[i].isfinite().nonzero()[:, 0].tolist()) == brute_kept(logits[i], state.params), options[i]


def test_top_p_beyond_the_first_window() -> None:
    scores = sample(torch.zeros(1, 2000), [row(top_p=0.5)], return_scores=True).scores
    assert scores is not None and scores[0].isfinite().nonzero()[:, 0].tolist() == list(range(1000))


def test_top_p_keeps_only_the_first_b29() -> None:
    assert draw([math.log(p) for p in (0.5, 0.3, 0.2)], 500, top_p=0.4) == [1.0, 0.0, 0.0]


def test_top_k_1_is_greedy_and_ties_take_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]] * 3)
    assert sample(logits, [row(top_k=1, temperature=1.5), row(temperature=0.0), row(temperature=1e-9)]).token_ids.tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_shares_are_the_softmax(temperature: float) -> None:
    """4 sigma of 20,000 seeds."""
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    expected = torch.tensor(logits).div(temperature).softmax(-1).tolist()
    for share, p in zip(draw(logits, 20_000, temperature=temperature), expected, strict=True):
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / 20_000)


def test_temperatures_0_and_1_in_one_batch_b29() -> None:
    logits = torch.tensor([[0.0, math.log(3)]]).expand(4000, -1).contiguous()
    token_ids = sample(logits, [row(seed=i, temperature=float(i % 2)) for i in range(4000)]).token_ids
    assert bool((token_ids[0::2] == 1).all())
    assert float(token_ids[1::2].float().mean()) == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 2000))


def test_penalty_counts_pass_the_hand_off_once_b28() -> None:
    """5, 6, 5, 6: the first token by one pool, the rest by another that got the counts as ints."""
    logits = torch.full((1, 8), -10.0)
    logits[0, 5], logits[0, 6] = 1.0, 0.9

    def step(state: PenaltyState, out: list[int]) -> None:
        params = row(num_output=len(out), temperature=0.0, frequency_penalty=0.2, penalties=state)
        out.append(int(sample(logits, [params]).token_ids[0]))
        state.add(out[-1])

    out: list[int] = []
    prefill = PenaltyState([2, 3])
    step(prefill, out)
    decode = PenaltyState.restore(*prefill.export())
    assert decode.num_output_tokens == 1
    for _ in range(3):
        step(decode, out)
    assert out == [5, 6, 5, 6]
    assert decode.export() == PenaltyState([3, 2, 3], out).export() == ([2, 3], [5, 6], [2, 2])


def test_penalties_by_hand() -> None:
    """Repetition over prompt and output; frequency and presence over output only."""
    state = PenaltyState([0, 1], [1, 2, 2])
    logits = torch.tensor([[2.0, -2.0, 4.0, 1.0]])
    params = row(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, penalties=state)
    assert adjust_logits(logits, [params])[0].tolist() == [1.0, -4.0 - 0.25 - 0.5, 2.0 - 0.5 - 0.5, 1.0]


def test_min_tokens_masks_what_would_end_the_request() -> None:
    logits = torch.tensor([[0.0, 9.0, 8.0, 7.0, 1.0]])
    state = row(temperature=0.0, min_tokens=2, stop_token_ids=(2,))
    chosen = [int(sample(logits, [replace(state, num_output_tokens=n)]).token_ids[0]) for n in (0, 1, 2)]
    assert chosen == [3, 3, 1]  # 1 is EOS
    assert int(sample(logits, [row(temperature=0.0, min_tokens=2, ignore_eos=True)]).token_ids[0]) == 1


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.5}], ids=["greedy", "filtered"])
def test_logprobs_are_raw_b62(params: dict[str, object]) -> None:
    logits = torch.tensor([[0.0, math.log(3)]] * 2)
    out = sample(logits, [row(logprobs=2, **params), row(logprobs=0, **params)])
    assert out.token_ids.tolist() == [1, 1]
    assert out.logprobs is not None and out.top_ids is not None and out.top_logprobs is not None
    assert out.logprobs.tolist() == pytest.approx([-0.2876820724] * 2, abs=1e-6)
    assert out.top_ids[0].tolist() == [1, 0]
    assert out.top_logprobs[0].tolist() == pytest.approx([-0.287682, -1.386294], abs=1e-6)


def test_logprobs_only_for_rows_that_ask() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    assert sample(logits, [row(), row(), row()]).logprobs is None
    out = sample(logits, [row(), row(logprobs=4), row(logprobs=0)])
    assert out.logprobs is not None and out.top_ids is not None
    assert out.logprobs.isnan().tolist() == [True, False, False]
    assert out.top_ids[0].tolist() == [-1] * 4 and out.top_ids[1].tolist() == logits[1].topk(4).indices.tolist()
