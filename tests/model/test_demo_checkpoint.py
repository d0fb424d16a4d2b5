"""The bundled model through our loader: transformers agrees on what we write back, and both records hold the same numbers."""

from pathlib import Path

import torch

from services.doctor.oracle import DEMO_MODEL, demo_reference
from services.model.config import load_config
from services.model.export import write_fp32_folder
from services.model.loader import load_weights
from tests.model.test_reference import transformers_logits


def test_logits_equal_transformers_beyond_the_original_length(tmp_path: Path) -> None:
    config = load_config(DEMO_MODEL)
    assert config.rope_scaling is not None
    num_tokens = config.rope_scaling.original_max_position_embeddings + 100
    ids = torch.randint(2, config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(40))
    write_fp32_folder(DEMO_MODEL, tmp_path)
    ours = demo_reference().forward(ids)
    torch.testing.assert_close(ours, transformers_logits(tmp_path, ids), atol=1e-4, rtol=1e-5)


def test_weights_are_the_reference_s() -> None:
    config = load_config(DEMO_MODEL)
    weights, reference = load_weights(DEMO_MODEL, config), demo_reference()
    assert torch.equal(weights.head, reference._head) and torch.equal(weights.embed, reference._embed)
    assert len(weights.layers) == config.num_hidden_layers >= 8
