"""Small models of other families through a cluster: chunked prefill, prefix hits, tokens equal to Mono beyond YaRN's original length."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.doctor.oracle import DEMO_MODEL, Tally, check_stream
from services.model.config import load_config
from services.model.loader import load_tensors
from services.model.params import SamplingParams
from services.model.reference import Reference
from tests.e2e.rig import Rig, generate_all
from tests.families import ORIGINAL_LENGTH, write_family

NUM_OUTPUT = 12
LENGTHS = (1, 64, 65, 130, 200, 300)


def make_requests(seed: int) -> list[dict[str, Any]]:
    """Half greedy, half seeded; two prompts share their first 150 tokens."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    requests = list[dict[str, Any]]()
    for index, length in enumerate(LENGTHS):
        prompt = [0, *(draw.randrange(3, 4000) for _ in range(length - 1))]
        requests.append({"prompt": prompt, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "seed": draw.randrange(2**64),
                         "temperature": 0.8 * (index % 2), "top_k": 40 * (index % 2)})  # fmt: skip
    shared = requests[-1]["prompt"][:150] + [draw.randrange(3, 4000) for _ in range(60)]
    return [*requests, requests[-1] | {"prompt": shared}]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["v2_lite", "kimi_k2", "moonlight", "v3_1"])
def test_cluster_equals_mono(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_family(folder, case, 7, vocab_size=4096, max_position_embeddings=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    settings = (f"model.path={folder}", "prefill.chunk_tokens=96", "prefill.num_pages=64", "decode.num_pages=64")
    requests, tally = make_requests(8), Tally()
    reference = Reference(load_config(folder), load_tensors(folder))
    assert max(LENGTHS) > 3 * ORIGINAL_LENGTH and max(LENGTHS) > 2 * 96
    rig = Rig(1, 1, settings, tmp_path / "run")
    try:
        cold, warm = (generate_all(rig.address, requests, at_once=4) for _ in range(2))
        rig.settle()
    finally:
        rig.close()
    for fields, answer in zip([*requests, *requests], [*cold, *warm], strict=True):
        sampling = {key: value for key, value in fields.items() if key != "prompt"}
        assert len(answer.token_ids) == NUM_OUTPUT
        check_stream(reference, fields["prompt"], SamplingParams(**sampling), answer.token_ids, tally)
    tally.assert_equal()
    full_pages = sum((len(fields["prompt"]) - 1) // 64 for fields in requests)
    assert sum(answer.end.usage.cached_tokens for answer in warm) > 0.5 * 64 * full_pages
