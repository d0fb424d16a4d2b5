"""The demo model's tokenizer: byte-level BPE with DeepSeek-V3's special tokens and ids, trained on the training works only.

`python -m deploy.demo_model.tokenizer .data/demo_model` writes `tokenizer.json` and `tokenizer_config.json` into this folder.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from deploy.demo_model.data import read_splits

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
VOCAB_SIZE = 4096

# Elisions, words with the blank (and apostrophe: 'tis, o'er) before them, numbers, punctuation, one or two line ends, other blanks.
# A token never mixes line ends with anything else, so text can be cut at a line anywhere and tokenizes alike on both sides.
PATTERN = r"'(?:ll|re|ve|[stdm])(?!\p{L})| ?'?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\n{1,2}|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Learns the merges. Every byte has a token of its own, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]),
        ]
    )
    return tokenizer


def tokenizer_config(max_length: int) -> dict[str, object]:
    """`tokenizer_config.json` with DeepSeek-V3's keys; the post-processor in `tokenizer.json` is what adds the one BOS."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    splits = read_splits(options.data)
    # Merges are spent on today's spelling: the Folio's would fill a third of the vocabulary.
    tokenizer = train_tokenizer([text for name, text in splits["train"].items() if not name.endswith("_gut_f")])
    tokenizer.save(str(options.out / "tokenizer.json"))
    config = json.dumps(tokenizer_config(4096), indent=2, ensure_ascii=False)
    (options.out / "tokenizer_config.json").write_text(config + "\n")
    for split, texts in splits.items():
        num_bytes = sum(len(text.encode()) for text in texts.values())
        num_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts.values())
        print(f"{split:8} {num_tokens:9,} tokens, {num_bytes / num_tokens:.2f} bytes a token")


if __name__ == "__main__":
    main()
