"""A byte-level tokenizer and the model folder of a model that never runs."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

BOS, EOS, FIRST_BYTE = 0, 1, 2
VOCAB = 258
MAX_MODEL_LEN = 64


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Ids 0 and 1 are BOS and EOS, id 2 + b is the byte b."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = {character: i for i, character in enumerate(alphabet)}
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character_of = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    assert set(character_of.values()) == set(order)
    vocab = {"<bos>": BOS, "<eos>": EOS} | {character_of[byte]: FIRST_BYTE + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def ids_of(text: str) -> list[int]:
    """Byte tokens of `text`, without BOS."""
    return [FIRST_BYTE + byte for byte in text.encode()]


def model_folder(folder: Path, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """config.json and tokenizer.json of a model that never runs."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": max_model_len,
        "bos_token_id": BOS, "eos_token_id": EOS, "model_type": "deepseek_v3",
    }
    (folder / "config.json").write_text(json.dumps(sizes))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
