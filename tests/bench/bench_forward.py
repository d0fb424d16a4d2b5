"""Time of one forward of either pool on random weights of the demo model's shape: `python -m tests.bench.bench_forward`.

For one torch thread: a decode step by batch and KV length (F-D<batch>-<kv_len>), prefill by chunks and cached prefix
(F-P<chunks>x<tokens>+<cached>). Medians of repeated steps; for meaningful numbers the machine should do nothing else.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.decode.forward import DecodeBatch, DecodeForward
from services.model.config import ModelConfig, load_config
from services.model.weights import AttentionWeights, LayerWeights, MlpWeights, ModelWeights, MoeWeights
from services.prefill.forward import PrefillChunk, PrefillForward
from tests.bench.report import Row, report

PAGE_SIZE = 64
NUM_PAGES = 1024
DECODE_BATCHES = (1, 2, 4, 8, 16)
DECODE_KV_LENS = (64, 250, 1000)
PREFILLS = (((128,), 0), ((128,) * 8, 0), ((512,), 0), ((2000,), 0), ((64,), 1936))


def random_weights(config: ModelConfig) -> ModelWeights:
    """Weights of the config's shapes, scaled so that activations stay near 1."""
    generator = torch.Generator().manual_seed(0)
    hidden, heads, inter = config.hidden_size, config.num_attention_heads, config.moe_intermediate_size

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    def mlp(width: int) -> MlpWeights:
        return MlpWeights(gate_up=matrix(2 * width, hidden), down=matrix(hidden, width))

    def attention() -> AttentionWeights:
        rank = config.q_lora_rank
        return AttentionWeights(
            q_a=None if rank is None else matrix(rank, hidden),
            q_a_norm=None if rank is None else torch.ones(rank),
            q_b=matrix(heads * config.qk_head_dim, rank or hidden),
            kv_a=matrix(config.latent_width, hidden),
            kv_a_norm=torch.ones(config.kv_lora_rank),
            kv_b=matrix(heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
            o=matrix(hidden, heads * config.v_head_dim),
        )

    def moe() -> MoeWeights:
        return MoeWeights(
            gate=matrix(config.n_routed_experts, hidden),
            bias=torch.zeros(config.n_routed_experts),
            gate_up=matrix(config.n_routed_experts, 2 * inter, hidden),
            down=matrix(config.n_routed_experts, hidden, inter),
            shared=mlp(config.n_shared_experts * inter) if config.n_shared_experts else None,
        )

    layers = tuple(
        LayerWeights(
            input_norm=torch.ones(hidden),
            attention=attention(),
            post_attention_norm=torch.ones(hidden),
            mlp=moe() if config.is_moe_layer(i) else mlp(config.intermediate_size),
        )
        for i in range(config.num_hidden_layers)
    )
    embed, head = matrix(config.vocab_size, hidden), matrix(config.vocab_size, hidden)
    return ModelWeights(embed=embed, layers=layers, norm=torch.ones(hidden), head=head)


def median_ms(step: Callable[[], object], repeats: int) -> float:
    """Median wall time of a step after two that warm up."""
    times: list[float] = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        step()
        if i >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Measure, print and write results/forward.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("deploy/demo_model"), help="folder whose config.json gives the shape")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(options.model)
    weights = random_weights(config)
    decode, prefill = DecodeForward(config, weights), PrefillForward(config, weights)
    pages = torch.randn(NUM_PAGES, config.num_hidden_layers, PAGE_SIZE, config.latent_width)
    order = torch.Generator().manual_seed(1)

    def table(num_tokens: int) -> list[int]:
        return torch.randperm(NUM_PAGES, generator=order)[: -(-num_tokens // PAGE_SIZE)].tolist()

    rows: list[Row] = []
    for batch in DECODE_BATCHES:
        for kv_len in DECODE_KV_LENS:
            work = DecodeBatch(list(range(batch)), [kv_len - 1] * batch, [table(kv_len) for _ in range(batch)])
            ms = median_ms(lambda work=work: decode.run(pages, work), options.repeats)
            conditions = f"decode step, batch {batch}, kv_len {kv_len}: {batch / ms * 1e3:.0f} tokens/s"
            rows.append(Row(f"F-D{batch}-{kv_len}", ms, "ms", "lower", None, None, conditions))
    for lens, cached in PREFILLS:
        chunks = [PrefillChunk([i % config.vocab_size for i in range(n)], cached, table(cached + n), True) for n in lens]
        ms = median_ms(lambda chunks=chunks: prefill.run(pages, chunks), max(3, options.repeats // 10))
        conditions = f"prefill step, {len(lens)} x {lens[0]} tokens, {cached} cached: {ms:.1f} ms"
        rows.append(Row(f"F-P{len(lens)}x{lens[0]}+{cached}", sum(lens) / ms * 1e3, "tokens/s", "higher", None, None, conditions))
    report("forward", rows)


if __name__ == "__main__":
    main()
