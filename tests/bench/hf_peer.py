"""The named peer of C9: transformers' own generate on the same fp32 weights, two threads. Run as a process; prints JSON.

    python -m tests.bench.hf_peer --batch 16 --prompt 128 --output 128
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from services.model.export import write_fp32_folder

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        write_fp32_folder(MODEL, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(9)
    prompt = torch.randint(3, 4000, (arguments.batch, arguments.prompt), generator=generator)
    rates: dict[str, float] = {}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        try:
            model.set_experts_implementation(implementation)
        except (ValueError, AttributeError) as error:
            rates[implementation] = 0.0
            print(f"# {implementation}: {error}", flush=True)
            continue
        rates[implementation] = max(_tokens_per_second(model, prompt, arguments.output) for _ in range(2))
    print(json.dumps({"rates": rates, "best": max(rates.values())}))


@torch.inference_mode()
def _tokens_per_second(model: torch.nn.Module, prompt: torch.Tensor, num_output: int) -> float:
    model.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)  # type: ignore[operator]
    began = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=num_output, min_new_tokens=num_output, do_sample=False)  # type: ignore[operator]
    assert output.shape == (prompt.shape[0], prompt.shape[1] + num_output)
    return prompt.shape[0] * num_output / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
