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
from kernels.fp8_gemm._table import Config, Streamed
from kernels.numerics import Fp8, relative_error
from kernels.quant_fp8 import quant_fp8
from kernels.timing import compare_us, num_sets
from tests.kernels.test_fp8_gemm import SHAPES_V3, random_weight

ROWS = (16, 32, 64, 128, 256)
SMS, SHARED, REGISTERS = 132, 227 << 10, 65536
TILES = {  # rows -> block_m, block_n, warps, swap
    16: [(16, 64, 4, True), (16, 128, 4, True), (16, 128, 8, True), (64, 16, 4, False), (64, 32, 4, False)],
    32: [(32, 64, 4, True), (32, 128, 4, True), (32, 128, 8, True), (64, 16, 4, False), (64, 32, 4, False)],
    64: [(64, 16, 4, False), (64, 32, 4, False), (64, 64, 4, False), (64, 128, 4, False), (64, 128, 8, False)],
    128: [(128, 32, 8, False), (128, 64, 4, False), (128, 64, 8, False), (128, 128, 8, False), (64, 128, 4, False)],
    256: [(256, 128, 4, False), (256, 64, 8, False), (128, 64, 8, False), (128, 128, 8, False)],
}
SPLIT_K = 10
DEADLINE_S = 80


class Case(NamedTuple):
    name: str
    m: int
    n: int
    k: int


def candidates(case: Case) -> list[Config | Streamed]:
    """For every tile and number of programs on an SM: splits that a simple model likes, and shares of the k-blocks of all tiles."""
    found: dict[Config, float] = {}
    streamed: list[Streamed] = []
    for (block_m, block_n, warps, swap), resident in product(TILES[case.m], (1, 2, 3, 4)):
        stage = (block_m + block_n) * 128 + max(block_m, 32) * 4
        tiles, blocks = -(-case.m // block_m) * -(-case.n // block_n), case.k // 128
        registers = min(255, REGISTERS // (resident * (warps + 4) * 32) // 8 * 8)
        consumers = 2 if (block_m, block_n) == (256, 128) else 1
        registers = 168 if consumers == 2 else registers
        needed = block_m * block_n * (1.5 if consumers == 2 else 2) // (consumers * warps * 32) + 40  # sums, a block's bare sums, others
        if resident < 4 // consumers and (consumers == 2 or (registers * (warps + 4) - 160) // warps >= needed):
            stages = min(10, (SHARED // resident - 3072) // stage)
            splits = {tiles * s for s in range(1, 9) if 0.8 * SMS * resident <= tiles * s <= SMS * resident}
            programs = {SMS * resident, *([SMS] if resident == 2 else []), *splits, *([tiles] if tiles > SMS else [])}
            if stages >= 3:
                streamed += [Streamed(block_m, block_n, p, stages, warps, registers, swap) for p in sorted(programs) if p <= tiles * blocks]
        stages = min(6, (SHARED // resident - 2048) // stage)
        if stages < 2 or consumers == 2 or (resident > 1 and resident * needed * warps * 32 > REGISTERS):
            continue
        for splits, tma in product(range(1, 9), (True, False)):
            if splits > blocks // 2 or (block_m == 256 and not tma):
                continue
            waves = -(-tiles * splits // (SMS * resident))
            units = waves * resident * -(-blocks // splits)  # k-blocks through the fullest SM
            streaming = max(units * stage * SMS / 6e6, case.n * case.k / 4.0e6 * units * SMS / (tiles * blocks))
            reduction = 0 if splits == 1 else 1 + splits * block_m * block_n * 4 / 6e4
            found[Config(block_m, block_n, splits, stages, warps, swap, tma)] = streaming + waves + reduction
    return [*streamed, *sorted(found, key=found.__getitem__)[:SPLIT_K]]


def kernel_of(config: Config | Streamed) -> Config | Streamed:
    """All that goes into the compiled kernel."""
    return config._replace(programs=0) if isinstance(config, Streamed) else config._replace(splits=0)


def compile_all(configs: Sequence[tuple[Case, Config | Streamed]]) -> dict[Config | Streamed, int]:
    """Compile every kernel in threads; registers by what makes a kernel, -1 if it spills much."""
    from kernels.fp8_gemm import _triton

    wanted = {kernel_of(config): (case, config) for case, config in configs}
    spills: dict[Config | Streamed, int] = {}

    def build(key: Config | Streamed) -> None:
        case, config = wanted[key]
        x = quant_fp8(torch.zeros(case.m, 128, dtype=torch.bfloat16, device="cuda"), backend="reference")
        w = Fp8(torch.zeros(128, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn), torch.ones(1, 1, device="cuda"))
        out = torch.empty(case.m, 128, dtype=torch.bfloat16, device="cuda")
        try:
            kernel = _triton.compile_only(x, w, out, config)
            kernel._init_handles()
            spills[key] = -1 if kernel.n_spills > 64 else kernel.n_regs
        except Exception as error:  # a configuration that cannot be built is no candidate
            print(f"{config}: {type(error).__name__} {str(error)[:120]}", flush=True)
            spills[key] = -1

    _triton.workspace_of(torch.device("cuda", torch.cuda.current_device()))
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(build, wanted))
    return spills


def measure(case: Case, weights: list[Fp8], built: dict[Config | Streamed, int]) -> tuple[dict[str, float], list[Config | Streamed]]:
    """Times by configuration and "deep_gemm", and the configurations that are right, best first."""
    from kernels.fp8_gemm import _triton

    x = [quant_fp8(torch.randn(case.m, case.k, dtype=torch.bfloat16, device="cuda")) for _ in weights]
    expected = torch.empty(case.m, case.n, device="cuda")
    fp8_gemm_torch(x[0], weights[0], expected)
    outs = [torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda") for _ in weights]

    calls = {"deep_gemm": [partial(fp8_gemm, *pair, out=out, backend="deep_gemm") for *pair, out in zip(x, weights, outs, strict=True)]}
    right: list[Config | Streamed] = []
    for config in candidates(case):
        if built[kernel_of(config)] < 0:
            continue
        got = torch.full((case.m, case.n), torch.nan, dtype=torch.bfloat16, device="cuda")
        try:
            _triton.fp8_gemm(x[0], weights[0], got, config)
            error = relative_error(got, expected)
        except AssertionError:  # the workspace is too small for it
            continue
        if not error < 1e-2:
            print(f"{case} {config}: WRONG, relative error {error:.3g}", flush=True)
            continue
        right.append(config)
        calls[label(config)] = [partial(_triton.fp8_gemm, *args, config) for args in zip(x, weights, outs, strict=True)]
    us = compare_us(calls, replays=12)
    return us, sorted(right, key=lambda config: us[label(config)])


def label(config: Config | Streamed) -> str:
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
            kinds = [min((us[label(c)] for c in best if isinstance(c, kind)), default=0.0) for kind in (Config, Streamed)]
            ours = f"split-K {kinds[0]:.1f} stream-K {kinds[1]:.1f}"
            print(f"{name:14} M{case.m:<3} DeepGEMM {us['deep_gemm']:5.1f} floor {floor:4.1f} {ours} | {few}", flush=True)
            results.append({**case._asdict(), "deep_gemm": us["deep_gemm"], "us": us})
        del weights
        torch.cuda.empty_cache()
    out.mkdir(parents=True, exist_ok=True)
    (out / "fp8_gemm.json").write_text(json.dumps(results, indent=1))
    print(f"{time.monotonic() - began:.0f} s; {', '.join(Config._fields)} | {', '.join(Streamed._fields)}")


if __name__ == "__main__":
    main()
