"""A real small model behind the hand-off: what decode adds to prefill's first token equals Mono, batched, seeded and with prefix hits."""
import random
from collections.abc import Callable

import pytest
import torch

from services.decode.forward import DecodeForward
from services.decode.request import RequestSpec
from services.doctor.oracle import Tally, check_stream
from services.kv.layout import KvLayout
from services.model.loader import load_weights
from services.model.params import SamplingParams
from services.model.penalties import PenaltyState
from services.model.reference import Reference
from services.model.sampling import RowState, sample
from services.prefill.forward import PrefillChunk, PrefillForward
from tests.decode.rig import Rig
from tests.tiny_model import YARN, random_tensors, tiny_config, tiny_raw, write_checkpoint

RAW = {"max_position_embeddings": 512, "rope_scaling": YARN}
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, DecodeForward, PrefillForward]:
    torch.manual_seed(0)
    config, tensors = tiny_config(**RAW), random_tensors(tiny_config(**RAW), seed=3)
    weights = load_weights(write_checkpoint(tmp_path_factory.mktemp("tiny"), tiny_raw(**RAW), tensors), config)
    return Reference(config, tensors), DecodeForward(config, weights), PrefillForward(config, weights)


def prefill_with(forward: PrefillForward) -> Callable[[torch.Tensor, list[int], RequestSpec], int]:
    def run(pages: torch.Tensor, page_table: list[int], spec: RequestSpec) -> int:
        logits = forward.run(pages, [PrefillChunk(token_ids=spec.token_ids, start=0, page_table=page_table, want_logits=True)])
        penalties = PenaltyState(spec.token_ids) if spec.params.has_penalties else None
        row = RowState(params=spec.params, position=len(spec.token_ids), num_output_tokens=0, eos_token_ids=(1,), penalties=penalties)
        return int(sample(logits, [row]).token_ids[0])

    return run


def test_batched_streams_equal_mono(make_rig: Callable[..., Rig], model: tuple[Reference, DecodeForward, PrefillForward]) -> None:
    reference, decode, prefill = model
    config = reference.config
    rig = make_rig(
        layout=KvLayout(config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim, "float32"), forward=decode,
        prefill=prefill_with(prefill), num_pages=64,
    )
    seed = 11
    print(f"{seed=}")
    rng, handle, tally = random.Random(seed), 0, Tally()
    for warm in (False, True):
        started: dict[int, RequestSpec] = {}
        rng.seed(seed)
        for i, length in enumerate(LENGTHS):
            handle += 1
            prompt = [rng.randrange(2, 260) for _ in range(length)]
            params = SamplingParams(
                max_tokens=24, seed=i, temperature=(0.0, 1.0)[i % 2], top_p=(1.0, 0.9)[i % 3 == 0], top_k=(0, 40)[i % 4 == 1],
                repetition_penalty=(1.0, 1.3)[i % 5 == 2], ignore_eos=True, logprobs=0,
            )
            started[handle] = rig.start(prompt, params, handle=handle)
            rig.exchange()
            rig.step()  # requests join one by one
        rig.run()
        for number, spec in started.items():
            tokens = rig.tokens(number)
            assert len(tokens) == 24
            check_stream(reference, spec.token_ids, spec.params, tokens, tally)
        assert rig.kv.transport.stats.num_pages == sum(-(-length // 64) for length in LENGTHS) + (
            sum(-(-length // 64) - (length - 1) // 64 for length in LENGTHS) if warm else 0
        ), "a second run moves only what decode lacks"
    tally.assert_equal()
