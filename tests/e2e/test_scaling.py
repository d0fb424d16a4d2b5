"""Pools grow and shrink under load: no stream fails, each equals Mono, no page is lost, new nodes serve."""

import asyncio
from pathlib import Path

import pytest

from services.doctor.oracle import Tally, check_stream, demo_reference
from services.model.params import SamplingParams
from tests.e2e.scaling_run import NUM_CLIENTS, run_scaling


@pytest.mark.slow
def test_no_stream_fails_while_pools_scale(tmp_path: Path) -> None:
    report = asyncio.run(run_scaling(tmp_path, seed=5))
    load, tally = report.load, Tally()
    assert not load.failed, f"{len(load.failed)} streams failed beside {len(load.done)}: {load.failed[:3]}"
    for fields, answer in load.done:
        sampling = {key: value for key, value in fields.items() if key != "prompt"}
        assert len(answer.token_ids) == fields["max_tokens"]
        check_stream(demo_reference(), fields["prompt"], SamplingParams(**sampling), answer.token_ids, tally)
    tally.assert_equal()
    assert len(load.served("decode")) == 3 and len(load.served("prefill")) == 3, "each node that ever was has served"
    assert len(load.done) >= 10 * NUM_CLIENTS
    print(f"{len(load.done)} streams, {tally.num_tokens} tokens; {load.recoveries()}; seconds {report.steps}")
    assert load.recoveries()["MOVE"] > 0, "decode nodes drained while nothing ran there"
