# seconds: 105
"""Measure the Triton kernel's configurations against DeepGEMM on one Hopper GPU, for the table of kernels/fp8_gemm/_table.py.

    python -m tests.bench.tune_fp8_gemm OUT [shape ...]

Every configuration is checked against the dequantised product before it is timed, with cold L2. Prints for each shape and number of
rows the few best ones and DeepGEMM's time; writes OUT/fp8_gemm.json: all times, best first.
"""

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from kernels.fp8_gemm import fp8_gemm, fp8_gemm_torch
from kernels.fp8_gemm._table import Config
from kernels.numerics import Fp8, relative_error
from kernels.quant_fp8 import quant_fp8
from kernels.timing import compare_us, num_sets
from tests.kernels.test_fp8_gemm import SHAPES_V3, random_weight

ROWS = (16, 32, 64, 128, 256)
SMS, SHARED, REGISTERS = 132, 227 << 10, 65536
TILES = {  # rows -> block_m, block_n, warps, swap, pair
    16: [(16, 64, 4, True, ""), (16, 128, 4, True, ""), (16, 128, 8, True, "")],
    32: [(32, 64, 4, True, ""), (32, 128, 4, True, ""), (32, 128, 8, True, ""), (64, 64, 4, False, "")],
    64: [(64, 64, 4, False, ""), (64, 128, 4, False, ""), (64, 128, 8, False, ""), (64, 64, 4, True, ""), (64, 256, 8, False, "n")],
    128: [(128, 64, 4, False, ""), (128, 64, 8, False, ""), (128, 128, 8, False, ""), (64, 128, 4, False, ""), (128, 256, 8, False, "n")],
    256: [(256, 64, 8, False, ""), (128, 128, 8, False, ""), (128, 64, 8, False, ""), (256, 128, 8, False, "m"), (128, 256, 8, False, "n")],
}
PER_CASE, PER_TILE = 24, 4
DEADLINE_S = 95


class Case(NamedTuple):
    name: str
    m: int
    n: int
    k: int


def candidates(case: Case) -> list[Config]:
    """For every tile and number of programs on an SM, the splits that a simple model of the GPU finds best."""
    found: dict[Config, float] = {}
    for (block_m, block_n, warps, swap, pair), resident in product(TILES[case.m], (1, 2, 3, 4)):
        stage = (block_m + block_n) * 128 + block_m * 4
        stages = min(6, (SHARED // resident - 2048) // stage)
        accumulators = block_m * block_n * (3 if pair else 4) // 2 // (warps * 32)
        if stages < 2 or (resident > 1 and resident * (accumulators + 40) * warps * 32 > REGISTERS):
            continue
        tiles = -(-case.m // block_m) * -(-case.n // block_n)
        blocks = case.k // 128
        for splits, shared, tma in product(range(1, min(16, blocks // 2) + 1), (False, True), (True, False)):
            if not tma and (pair or block_m == 256):
                continue
            programs = tiles * splits
            if (shared and (splits == 1 or programs > SMS * resident)) or (splits > 1 and programs * block_m * block_n > 8 << 20):
                continue
            waves = -(-programs // (SMS * resident))
            units = waves * resident * -(-blocks // splits)  # k-blocks through the fullest SM
            streaming = max(units * stage * SMS / 5.5e6, case.n * case.k / 4.0e6 * units * SMS / (tiles * blocks))
            partials = programs * block_m * block_n * 8 / 5.5e6
            alone = splits * block_m * block_n * 4 / 8e4
            reduction = 0 if splits == 1 else 2 + partials if shared else 1 + max(alone, partials)
            found[Config(block_m, block_n, splits, stages, warps, swap, pair, shared, tma)] = streaming + waves + reduction
    kept: list[Config] = []
    for config in sorted(found, key=found.__getitem__):
        alike = [c for c in kept if c._replace(splits=0, stages=0, shared=False) == config._replace(splits=0, stages=0, shared=False)]
        if len(alike) < PER_TILE:
            kept.append(config)
    return kept[:PER_CASE]


def kernel_of(config: Config) -> Config:
    """All that goes into the compiled kernel."""
    return config._replace(splits=min(config.splits, 2), ahead=min(config.ahead, 1))


def compile_all(configs: Sequence[tuple[Case, Config]]) -> dict[Config, int]:
    """Compile every kernel in threads; registers by what makes a kernel, -1 if it spills much."""
    from kernels.fp8_gemm import _triton

    wanted = {kernel_of(config): (case, config) for case, config in configs}
    spills: dict[Config, int] = {}

    def build(key: Config) -> None:
        case, config = wanted[key]
        x = quant_fp8(torch.zeros(case.m, 128, dtype=torch.bfloat16, device="cuda"), backend="reference")
        w = Fp8(torch.zeros(128, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn), torch.ones(1, 1, device="cuda"))
        out = torch.empty(case.m, 128, dtype=torch.bfloat16, device="cuda")
        try:
            kernel = _triton.compile_only(x, w, out, config)
            kernel._init_handles()
            spills[key] = -1 if kernel.n_spills > 32 else kernel.n_regs
        except Exception as error:  # a configuration that cannot be built is no candidate
            print(f"{config}: {type(error).__name__} {str(error)[:120]}", flush=True)
            spills[key] = -1

    _triton.workspace_of(torch.device("cuda", torch.cuda.current_device()))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(build, wanted))
    return spills


def variants(case: Case, best: Sequence[Config]) -> list[Config]:
    """The best few with weights asked for ahead, and starting before the kernel before them ends."""
    if case.m not in (64, 256) or case.n * case.k > 2 << 26:
        return []
    plain = list(dict.fromkeys(config._replace(shared=False) for config in best[:4]))[:3]
    ahead = [config._replace(ahead=number) for config in [*best[:2], *plain] for number in (6, 1000)]
    return list(dict.fromkeys([*ahead, *(c._replace(ahead=n, overlap=True) for c in plain for n in (0, 6, 1000))]))


def measure(case: Case, weights: list[Fp8], built: dict[Config, int]) -> tuple[dict[str, float], list[Config]]:
    """Times by configuration and "deep_gemm", and the configurations that are right, best first."""
    from kernels.fp8_gemm import _triton

    x = [quant_fp8(torch.randn(case.m, case.k, dtype=torch.bfloat16, device="cuda")) for _ in weights]
    expected = torch.empty(case.m, case.n, device="cuda")
    fp8_gemm_torch(x[0], weights[0], expected)
    outs = [torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda") for _ in weights]

    def times(configs: Sequence[Config]) -> dict[str, float]:
        calls = {"deep_gemm": [partial(fp8_gemm, *pair, out=out, backend="deep_gemm") for *pair, out in zip(x, weights, outs, strict=True)]}
        for config in configs:
            if built[kernel_of(config)] < 0:
                continue
            got = torch.full((case.m, case.n), torch.nan, dtype=torch.bfloat16, device="cuda")
            try:
                _triton.fp8_gemm(x[0], weights[0], got, config)
                error = relative_error(got, expected)
            except Exception as failure:
                print(f"{case} {config}: {type(failure).__name__} {str(failure)[:200]}", flush=True)
                continue
            if not error < 1e-2:
                print(f"{case} {config}: WRONG, relative error {error:.3g}", flush=True)
                continue
            right[label(config)] = config
            calls[label(config)] = [partial(_triton.fp8_gemm, *args, config) for args in zip(x, weights, outs, strict=True)]
        return compare_us(calls, replays=12)

    right: dict[str, Config] = {}
    us = times(candidates(case))
    more = variants(case, sorted(right.values(), key=lambda config: us[label(config)]))
    if more:
        built |= compile_all([(case, config) for config in more])
        us |= times(more)
    return us, sorted(right.values(), key=lambda config: us[label(config)])


def label(config: Config) -> str:
    return f"({', '.join(str(int(x) if isinstance(x, bool) else x) for x in config)})"


def main() -> None:
    began = time.monotonic()
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(SHAPES_V3)
    cases = [Case(name, m, *SHAPES_V3[name]) for name in names for m in ROWS]
    built = compile_all([(case, config) for case in cases for config in candidates(case)])
    spilling = ", ".join(label(config) for config, registers in built.items() if registers < 0)
    print(f"{len(built)} kernels built in {time.monotonic() - began:.0f} s; left out: {spilling or 'none'}", flush=True)
    results = []
    for name in names:
        n, k = SHAPES_V3[name]
        weights = [random_weight(n, k) for _ in range(num_sets(n * k))]
        for case in (case for case in cases if case.name == name and time.monotonic() - began < DEADLINE_S):
            us, best = measure(case, weights, built)
            floor = max(n * k / 4.3e6, 2 * case.m * n * k / 1979e6)
            few = "; ".join(f"{us[label(config)]:.1f} {label(config)}" for config in best[:4])
            print(f"{name:15} M{case.m:<4} DeepGEMM {us['deep_gemm']:6.1f} floor {floor:5.1f} | {few}", flush=True)
            results.append({**case._asdict(), "deep_gemm": us["deep_gemm"], "ours": [[us[label(config)], *config] for config in best]})
        del weights
        torch.cuda.empty_cache()
    out.mkdir(parents=True, exist_ok=True)
    (out / "fp8_gemm.json").write_text(json.dumps(results, indent=1))
    print(f"{time.monotonic() - began:.0f} s; a configuration is {', '.join(Config._fields)}")


if __name__ == "__main__":
    main()
