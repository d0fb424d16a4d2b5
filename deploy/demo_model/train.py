"""Trains the demo model on one GPU (or, for trying things, on a CPU): `python -m deploy.demo_model.train .data/demo_model --out <folder>`.

The text is small (3.2 M tokens), so everything here works against learning it by heart: dropout, strong weight decay, an average of the
weights, and of all averages measured the one with the best validation loss is exported. From `QUANTIZED_FROM` of the run on, forwards
see weights rounded as the export rounds them, and validation always does: what is selected is what is stored.
"""

import argparse
import copy
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from deploy.demo_model.data import read_splits
from deploy.demo_model.evaluate import TRIAL, Effort, bits_per_byte, evaluate
from deploy.demo_model.export import save_checkpoint
from deploy.demo_model.net import Net, demo_config
from deploy.demo_model.tokenizer import BOS_ID, EOS_ID

QUANTIZED_FROM = 0.7
WARMUP = 0.03
MTP_WEIGHT = 0.3
BALANCE_SPEED = 1e-3
# One cycle of sequence lengths: mostly the original context, some of YaRN's extended range.
LENGTHS = (1024, 1024, 2048, 1024, 1024, 4096)


@dataclass(frozen=True)
class Recipe:
    device: str
    minutes: float
    steps: int
    batch_tokens: int
    learning_rate: float
    weight_decay: float
    dropout: float
    folio_share: float
    seed: int


class Windows:
    """Random windows of the training works, each begun with BOS. Works follow one another as BOS, text, EOS."""

    def __init__(self, texts: dict[str, str], tokenizer: Tokenizer, recipe: Recipe) -> None:
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.device, self.folio_share = torch.device(recipe.device), recipe.folio_share
        folio = [text for name, text in texts.items() if name.endswith("_gut_f")]
        modern = [text for name, text in texts.items() if not name.endswith("_gut_f")]
        self.streams = [self._stream(modern, tokenizer), self._stream(folio, tokenizer)]
        self.num_tokens = sum(len(stream) for stream in self.streams)

    def _stream(self, texts: list[str], tokenizer: Tokenizer) -> Tensor:
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        return torch.tensor([token for e in encoded for token in (BOS_ID, *e.ids, EOS_ID)], device=self.device)

    def draw(self, rows: int, length: int) -> Tensor:
        """[rows, length] ids."""
        num_folio = int((torch.rand(rows, generator=self.generator) < self.folio_share).sum())
        parts = [self._draw(self.streams[0], rows - num_folio, length), self._draw(self.streams[1], num_folio, length)]
        ids = torch.cat(parts)
        ids[:, 0] = BOS_ID
        return ids

    def _draw(self, stream: Tensor, rows: int, length: int) -> Tensor:
        start = torch.randint(len(stream) - length, (rows, 1), generator=self.generator).to(self.device)
        return stream[start + torch.arange(length, device=self.device)]


def loss_of(net: Net, ids: Tensor) -> tuple[Tensor, Tensor]:
    """ids [b, n + 2] -> mean losses of the next token and of the token after it, each over n positions."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        hidden = net.hidden(ids[:, :-2])
        logits = net.logits(hidden)
        mtp_logits = net.logits(net.mtp_hidden(hidden, ids[:, 1:-1]))
    main = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:-1].flatten())
    return main, F.cross_entropy(mtp_logits.float().flatten(0, 1), ids[:, 2:].flatten())


def make_optimizer(net: Net, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [p for p in net.parameters() if p.ndim >= 2]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=recipe.device != "cpu")


@torch.no_grad()
def update_average(average: Net, net: Net, step: int) -> None:
    """Exponential average of the weights; buffers (gate biases) are copied."""
    decay = min(0.998, (step + 1) / (step + 10))
    for mine, theirs in zip(average.parameters(), net.parameters(), strict=True):
        mine.lerp_(theirs, 1 - decay)
    for mine, theirs in zip(average.buffers(), net.buffers(), strict=True):
        mine.copy_(theirs)


class Best:
    """The averaged weights with the lowest validation loss so far."""

    def __init__(self, average: Net, tokenizer: Tokenizer, texts: list[str]) -> None:
        self.average, self.tokenizer, self.texts = average, tokenizer, texts
        self.bits, self.step = float("inf"), -1
        self.state: dict[str, Tensor] = {}

    def offer(self, step: int) -> float:
        """Measures the average now; keeps it when it is the best. Returns its bits a byte."""
        device_type = self.average.inv_freq.device.type
        with torch.autocast(device_type, dtype=torch.bfloat16):
            bits = bits_per_byte(self.average, self.tokenizer, self.texts)
        if bits < self.bits:
            self.bits, self.step, self.state = bits, step, copy.deepcopy(self.average.state_dict())
        return bits


def train(net: Net, windows: Windows, best: Best, recipe: Recipe, evals: int = 24) -> dict[str, Any]:
    """Runs until `steps` or `minutes` are used up, whichever is first; the schedule follows the same measure."""
    optimizer, start, step, progress, next_eval = make_optimizer(net, recipe), time.monotonic(), 0, 0.0, 1 / evals
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(progress / WARMUP + 0.01, (1 - progress) / (1 - WARMUP), 1.0)
        net.set_fake_quant(progress >= QUANTIZED_FROM)
        length = min(LENGTHS[step % len(LENGTHS)], recipe.batch_tokens)
        main, mtp = loss_of(net, windows.draw(recipe.batch_tokens // length, length + 2))
        (main + MTP_WEIGHT * mtp).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for gate in net.gates():
            gate.balance(BALANCE_SPEED * (1 - progress))
        update_average(best.average, net, step)
        step += 1
        progress = max(step / recipe.steps, (time.monotonic() - start) / 60 / recipe.minutes)
        if progress >= min(next_eval, 1.0):
            next_eval += 1 / evals
            losses = f"loss {main.item():.3f} mtp {mtp.item():.3f} valid {best.offer(step):.4f} bits/byte"
            print(f"{time.monotonic() - start:5.0f} s step {step:6} {losses}", flush=True)
    return {"steps": step, "tokens": step * recipe.batch_tokens, "seconds": time.monotonic() - start}


def parse() -> tuple[argparse.Namespace, Recipe]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by deploy.demo_model.data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=14.0)
    parser.add_argument("--steps", type=int, default=5368)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--folio-share", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help="evaluate a few thousand characters only")
    options = parser.parse_args()
    return options, Recipe(**{name: getattr(options, name) for name in Recipe.__dataclass_fields__})


def main() -> None:
    options, recipe = parse()
    torch.manual_seed(recipe.seed)
    tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
    splits, device = read_splits(options.data), torch.device(recipe.device)
    windows = Windows(splits["train"], tokenizer, recipe)
    net = Net(demo_config(tokenizer.get_vocab_size()), recipe.dropout).to(device)
    average = copy.deepcopy(net).eval()
    average.set_fake_quant(True)
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, {windows.num_tokens:,} training tokens, {recipe}", flush=True)
    best = Best(average, tokenizer, [text[: TRIAL.chars if options.trial else None] for text in splits["valid"].values()])
    report: dict[str, Any] = {"recipe": asdict(recipe), "training": train(net, windows, best, recipe)}
    average.load_state_dict(best.state)
    options.out.mkdir(parents=True, exist_ok=True)
    report["bytes"] = save_checkpoint(average, options.out)
    report["training"] |= {"best_step": best.step, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    report |= evaluate(options.out, options.data, tokenizer, device, TRIAL if options.trial else Effort())
    (options.out / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(report, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
