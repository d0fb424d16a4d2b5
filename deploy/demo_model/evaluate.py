"""What the model card states, measured on the exported checkpoint (FP8 values, dequantised, fp32 arithmetic).

`python -m deploy.demo_model.evaluate .data/demo_model --device cpu` prints the report and updates `report.json` beside the weights.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from deploy.demo_model.data import SPLITS, read_splits
from deploy.demo_model.export import load_net
from deploy.demo_model.net import Net
from deploy.demo_model.tokenizer import BOS_ID

SAMPLE_PROMPTS = ("MACBETH.\n", "VIOLA.\nWhat country, friends, is this?\n\n", "Shall I compare thee to a summer's day?\n")


@dataclass(frozen=True)
class Effort:
    """How much of everything is measured. Continuations cost a full forward a token."""

    rows: int = 48
    steps: int = 128
    chars: int | None = None
    contexts: tuple[int, ...] = (2048, 512, 4096)


TRIAL = Effort(rows=3, steps=8, chars=6000, contexts=(512,))


@torch.no_grad()
def nats(net: Net, ids: Sequence[int], context: int = 2048) -> float:
    """Negative log-likelihood of a whole text, each token scored once.

    Windows of `context` tokens, a BOS first, move by half a window: beyond the first window a token sees at least context / 2 - 1 others.
    """
    device, stride, batch = net.inv_freq.device, context // 2, max(1, 16384 // context)
    starts = [0, *range(stride, max(len(ids) - stride + 1, 1), stride)]
    total, num_scored = torch.zeros((), dtype=torch.float64, device=device), 0
    for chunk in (starts[i : i + batch] for i in range(0, len(starts), batch)):
        rows = [torch.tensor([BOS_ID, *ids[start : start + context - 1]]) for start in chunk]
        window = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        logits = net.logits(net.hidden(window)[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten(), reduction="none").view(len(chunk), -1)
        for row, start in enumerate(chunk):
            scored = loss[row, 0 if start == 0 else context - 1 - stride : len(rows[row]) - 1]
            total += scored.sum().double()
            num_scored += len(scored)
    assert num_scored == len(ids), f"scored {num_scored} of {len(ids)} tokens"
    return total.item()


def bits_per_byte(net: Net, tokenizer: Tokenizer, texts: Sequence[str], context: int = 2048) -> float:
    """Bits a byte of UTF-8 over all texts together."""
    num_bytes = sum(len(text.encode()) for text in texts)
    return sum(nats(net, tokenizer.encode(text, add_special_tokens=False).ids, context) for text in texts) / math.log(2) / num_bytes


def trigram_bits_per_byte(tokenizer: Tokenizer, train: Sequence[str], texts: Sequence[str]) -> float:
    """The same measure for a trigram model over the same tokens, interpolated down to uniform with Witten-Bell weights."""
    vocab_size = tokenizer.get_vocab_size()
    counts: Counter[tuple[int, ...]] = Counter()
    for text in train:
        ids = [BOS_ID, *tokenizer.encode(text, add_special_tokens=False).ids]
        for order in (1, 2, 3):
            counts.update(zip(*(ids[k:] for k in range(order)), strict=False))
    seen, types = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for gram, count in counts.items():
        seen[gram[:-1]] += count
        types[gram[:-1]] += 1

    def probability(gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / vocab_size
        history, lower = gram[:-1], probability(gram[1:])
        return (counts[gram] + types[history] * lower) / (seen[history] + types[history]) if seen[history] else lower

    bits = 0.0
    for text in texts:
        ids = [BOS_ID, *tokenizer.encode(text, add_special_tokens=False).ids]
        bits -= sum(math.log2(probability(tuple(ids[max(i - 2, 0) : i + 1]))) for i in range(1, len(ids)))
    return bits / sum(len(text.encode()) for text in texts)


def gumbel(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    uniform = torch.rand(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return -(-uniform.clamp(1e-10, 1 - 1e-7).log()).log()


@torch.no_grad()
def continue_text(net: Net, prompts: Tensor, noise: Tensor) -> Tensor:
    """prompts [b, n], noise [b, steps, vocab] -> [b, n + steps]: each token is the argmax of logits + noise (zeros: greedy)."""
    ids = prompts
    for step in range(noise.shape[1]):
        logits = net.logits(net.hidden(ids)[:, -1]).float()
        ids = torch.cat((ids, (logits + noise[:, step]).argmax(dim=-1, keepdim=True)), dim=1)
    return ids


@torch.no_grad()
def mtp_agreement(net: Net, ids: Tensor, noise: Tensor) -> float:
    """Share of the continuation's tokens (from its second on) that the MTP layer proposes one step ahead, given the same noise."""
    drafts = net.logits(net.mtp_hidden(net.hidden(ids)[:, :-1], ids[:, 1:])).float()  # column i proposes token i + 2
    steps = noise.shape[1]
    proposed = (drafts[:, -steps:-1] + noise[:, 1:]).argmax(dim=-1)
    return (proposed == ids[:, 1 - steps :]).float().mean().item()


def mtp_acceptance(net: Net, tokenizer: Tokenizer, texts: Sequence[str], rows: int, steps: int, prompt: int = 256) -> dict[str, float]:
    """Acceptance of one draft a step on continuations of prompts spread evenly over the texts."""
    device, per_text = net.inv_freq.device, -(-rows // len(texts))
    prompts: list[list[int]] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        gap = (len(ids) - prompt) // per_text
        prompts += [[BOS_ID, *ids[k * gap : k * gap + prompt - 1]] for k in range(per_text)]
    start = torch.tensor(prompts, device=device)
    none = torch.zeros(len(prompts), steps, 1, device=device)
    noise = gumbel((len(prompts), steps, net.config["vocab_size"]), seed=1, device=device)
    sampled = continue_text(net, start, noise)
    return {
        "greedy": mtp_agreement(net, continue_text(net, start, none), none),
        "temperature_1_shared_noise": mtp_agreement(net, sampled, noise),
        "temperature_1_argmax_draft": mtp_agreement(net, sampled, none),
    }


def samples(net: Net, tokenizer: Tokenizer, steps: int) -> list[dict[str, str]]:
    """Continuations of a few held-out beginnings: greedy, and at temperature 0.8 (noise scaled instead of logits)."""
    device, found = net.inv_freq.device, []
    for seed, prompt in enumerate(SAMPLE_PROMPTS):
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        noise = gumbel((1, steps, net.config["vocab_size"]), seed, device)
        for mode, scale in (("greedy", 0.0), ("temperature 0.8", 0.8)):
            out = continue_text(net, ids, noise * scale)[0, ids.shape[1] :].tolist()
            found.append({"prompt": prompt, "mode": mode, "text": tokenizer.decode(out)})
    return found


def evaluate(folder: Path, data: Path, tokenizer: Tokenizer, device: torch.device, effort: Effort) -> dict[str, Any]:
    """All numbers of the card."""
    splits, net = read_splits(data), load_net(folder).to(device)
    train, valid, heldout = ({name: text[: effort.chars] for name, text in splits[split].items()} for split in SPLITS)
    texts = list(heldout.values())
    bits = {name: bits_per_byte(net, tokenizer, [text]) for name, text in heldout.items()}
    bits["validation"] = bits_per_byte(net, tokenizer, list(valid.values()))
    for context in effort.contexts:
        bits[f"held out, windows of {context}"] = bits_per_byte(net, tokenizer, texts, context)
    bits["held out, interpolated trigram"] = trigram_bits_per_byte(tokenizer, list(train.values()), texts)
    acceptance = mtp_acceptance(net, tokenizer, texts, effort.rows, effort.steps)
    return {"bits_per_byte": bits, "mtp_acceptance": acceptance, "samples": samples(net, tokenizer, effort.steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trial", action="store_true", help="a few thousand characters only")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    report = evaluate(options.model, options.data, tokenizer, torch.device(options.device), TRIAL if options.trial else Effort())
    file = options.model / "report.json"
    # What the training run wrote about itself stays.
    report = (json.loads(file.read_text()) if file.exists() else {}) | report
    print(json.dumps(report, indent=2, ensure_ascii=False))
    file.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
