"""The bundled model is what its card says: format, size, tokenizer, and text it never saw.

That `transformers` computes equal logits on it is tests/model/test_demo_checkpoint.py.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from deploy.demo_model.data import DROPPED, assert_no_leak, clean, split_of
from deploy.demo_model.fp8 import FP8_MAX, dequantize_blocks, quantize_blocks
from services.doctor.oracle import DEMO_MODEL, demo_reference
from services.model.reference import Cache

EXCERPT = (Path(__file__).parent / "macbeth_excerpt.txt").read_text()
CONFIG = json.loads((DEMO_MODEL / "config.json").read_text())
REPORT = json.loads((DEMO_MODEL / "report.json").read_text())
INDEX = json.loads((DEMO_MODEL / "model.safetensors.index.json").read_text())["weight_map"]
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def stored_tensors() -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """name -> (file, dtype, shape), from the shards themselves."""
    found: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    for file in sorted(DEMO_MODEL.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (no mapping)
                piece = shard.get_slice(name)
                found[name] = (file.name, piece.get_dtype(), tuple(piece.get_shape()))
    return found


def test_folder_is_at_most_24_mb() -> None:
    files = [file for file in DEMO_MODEL.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 24_000_000


def test_config_is_v3_with_its_real_latent() -> None:
    wanted = {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    assert {key: CONFIG[key] for key in wanted} == wanted
    assert CONFIG["num_hidden_layers"] >= 8 and 8 <= CONFIG["n_routed_experts"] <= 16 and CONFIG["q_lora_rank"] is not None
    assert CONFIG["rope_scaling"]["type"] == "yarn" and CONFIG["rope_scaling"]["original_max_position_embeddings"] == 1024
    assert CONFIG["quantization_config"]["quant_method"] == "fp8" and CONFIG["quantization_config"]["weight_block_size"] == [128, 128]
    assert CONFIG["vocab_size"] == TOKENIZER.get_vocab_size()


def test_index_names_every_tensor_and_scales_lie_beside_their_data() -> None:
    stored = stored_tensors()
    assert {name: file for name, (file, _, _) in stored.items()} == INDEX
    assert len(set(INDEX.values())) == 2
    for name, (file, dtype, shape) in stored.items():
        if name.endswith("_scale_inv"):
            data_file, data_dtype, (rows, columns) = stored[name.removesuffix("_scale_inv")]
            assert (file, dtype, data_dtype) == (data_file, "F32", "F8_E4M3"), name
            assert shape == (math.ceil(rows / 128), math.ceil(columns / 128)), name
        elif name.endswith("e_score_correction_bias"):
            assert dtype == "F32", name
        elif dtype != "F8_E4M3":
            assert dtype == "BF16" and re.search(r"norm\.weight|gate\.weight|embed_tokens|lm_head|eh_proj", name), name


def test_mtp_layer_is_there_and_embedding_and_head_are_stored_once() -> None:
    stored = stored_tensors()
    mtp = {name.removeprefix("model.layers.8.") for name in stored if name.startswith("model.layers.8.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "self_attn.kv_a_proj_with_mqa.weight"} <= mtp
    outside = {name for name in stored if re.search(r"embed_tokens|lm_head|shared_head\.head", name)}
    assert outside == {"model.embed_tokens.weight", "lm_head.weight"}


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=200))
@example("")
@example("Hail, Macbeth!\r\n\n\n  'tis\t nam'd 1606 \n")
@example("日本語 é e\u0301 🎉\u200d \u0000")
def test_any_text_round_trips_behind_exactly_one_bos(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert ids[0] == 0 and ids.count(0) == 1 and 1 not in ids and 2 not in ids
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_have_v3_names_and_ids() -> None:
    assert [TOKENIZER.id_to_token(idx) for idx in (0, 1)] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    settings_file = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    assert settings_file["bos_token"] == "<｜begin▁of▁sentence｜>" and settings_file["add_bos_token"] is True


def test_line_ends_share_no_token_with_other_characters() -> None:
    with_line_end = [token for token in TOKENIZER.get_vocab() if "Ċ" in token]
    assert sorted(with_line_end) == ["Ċ", "ĊĊ"]


def test_text_it_never_saw_and_its_drafts() -> None:
    """Bits a byte of a held-out scene, and how often the MTP layer names the model's own next choice on real text."""
    reference = demo_reference()
    ids = torch.tensor(TOKENIZER.encode(EXCERPT).ids)
    hidden = reference.hidden(ids)
    logits = reference.logits(hidden)
    bits = F.cross_entropy(logits[:-1], ids[1:], reduction="sum").item() / math.log(2) / len(EXCERPT.encode())
    drafts = reference.mtp_logits(hidden[:-1], ids[1:], Cache(1)).argmax(dim=-1)
    agreement = (drafts[:-1] == logits[1:-1].argmax(dim=-1)).float().mean().item()
    assert bits <= 2.10, f"{bits:.3f} bits a byte"
    assert agreement >= 0.5, f"{agreement:.3f} of drafts agree"


def test_card_states_what_was_measured() -> None:
    card = (DEMO_MODEL / "README.md").read_text()
    bits, acceptance, training = REPORT["bits_per_byte"], REPORT["mtp_acceptance"], REPORT["training"]
    assert bits["held out, windows of 2048"] <= 2.10 and acceptance["greedy"] >= 0.6
    for number in [*bits.values(), *acceptance.values()]:
        assert f" {number:.3f} " in card, f"the card lacks {number:.3f}"
    assert f"{training['best_step']:,}" in card and f"{training['steps']:,}" in card and f"{training['tokens'] / 1e6:.1f} M" in card


def test_a_reprint_in_old_spelling_is_a_leak() -> None:
    modern = "Were all the letters sun, I could not see one. Here, read; and after this, and then to dinner have I said again.\n"
    folio = "Were all the Letters Sunne, I could not see one. Heere, reade; and after this, and then to dinner haue I said againe.\n"
    splits = {"train": {"a": folio}, "valid": {"b": "nothing of the kind\n"}, "heldout": {"c": modern}}
    with pytest.raises(AssertionError, match="repeats heldout text"):
        assert_no_leak(splits)
    assert_no_leak(splits | {"train": {"a": "Entirely other words, and they go on for more than thirteen of them in a row.\n"}})


def test_clean_strips_line_numbers_and_refuses_licence_headers() -> None:
    assert clean(b"\xef\xbb\xbf\r\n\r\nBy proof the undoubted Son of God, inspire,     10\r\n\r\n\r\n\r\nAs thou  \r\n") == (
        "By proof the undoubted Son of God, inspire,\n\nAs thou\n"
    )
    with pytest.raises(ValueError, match="licence header"):
        clean(b"*** START OF THE PROJECT GUTENBERG EBOOK ***\n")


def test_other_editions_of_held_out_works_are_in_no_split() -> None:
    assert {split_of(name) for name in ("macbeth_gut", "twelfth_night_gut", "sonnets_gut")} == {"heldout"}
    assert {"macbeth_gut_f", "twelfe-night_gut_f", "passionate_pilgrim_gut"} <= DROPPED


@pytest.mark.parametrize("shape", [(576, 256), (128, 128), (3, 130, 200), (1, 1)])
def test_fp8_blocks_use_the_whole_range_and_err_by_one_in_sixteen_at_most(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    data, scale = quantize_blocks(weight)
    assert data.shape == weight.shape and scale.shape[-2:] == tuple(math.ceil(size / 128) for size in shape[-2:])
    assert data.float().abs().max() == FP8_MAX
    back = dequantize_blocks(data, scale)
    # Three bits of mantissa; the smallest values of a block are subnormal, spaced 2**-9.
    assert ((back - weight).abs() <= weight.abs() / 16 + scale.max() * 2**-10 + 1e-7).all()
    again, scale_again = quantize_blocks(back)
    assert torch.equal(again.view(torch.uint8), data.view(torch.uint8)) and torch.allclose(scale_again, scale)
