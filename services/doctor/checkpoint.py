"""Sizes of a checkpoint, of a rank's share and of its KV, from config.json and the headers of the files alone."""

import dataclasses
import math
import sys
from pathlib import Path

from services.kv.layout import KvDtype, KvLayout, compatibility
from services.model.checkpoint import INDEX_NAME, ITEM_BYTES, SINGLE_NAME, TensorEntry, cached_revision, read_entries, revision
from services.model.config import ModelConfig, load_config
from services.model.contents import check_entries
from services.model.families import FAMILIES
from services.model.names import EMBED, HEAD, model_shapes, mtp_shapes
from services.model.params import SAMPLER_VERSION
from services.model.split import Split, kept_region

GPUS = {"H100, 80 GB": 80.0, "H200, 141 GB": 141.0}
USABLE = 0.9
"""Share of a GPU's memory for weights and pages; activations, workspaces and graphs have the rest."""

_HASHED_AT_ONCE = 4_000_000_000  # bytes: a few seconds


@dataclasses.dataclass(frozen=True)
class Report:
    """What `inspect` found."""

    source: Path
    config: ModelConfig
    split: Split
    layout: KvLayout
    num_params: int  # the model without its MTP layer
    num_active: int  # of them, those that one token meets
    num_mtp_params: int
    rank_bytes: dict[str, int]  # part of the model -> bytes as stored
    has_files: bool
    revision: str | None

    @property
    def total_bytes(self) -> int:
        """All weights of a rank."""
        return sum(self.rank_bytes.values())

    @property
    def fingerprint(self) -> str | None:
        """What ranks compare before pages pass; None without a revision."""
        if self.revision is None:
            return None
        config = dataclasses.asdict(self.config)
        return compatibility(config, self.revision, self.layout, sampler_version=SAMPLER_VERSION).fingerprint

    def num_pages(self, gpu_memory: float) -> int:
        """Pages beside the weights on a GPU of `gpu_memory` GB; none when the weights do not fit."""
        return max(0, int(gpu_memory * 1e9 * USABLE) - self.total_bytes) // self.layout.page_bytes


def inspect(source: Path, *, ep: int = 1, tp: int = 1, kv_dtype: KvDtype = "bfloat16", read_all: bool = False) -> Report:
    """Read `source`, a model folder with or without its files, or a config.json; raises BatonErrors of one sentence.

    read_all  whether to read every byte for the revision where that takes more than a few seconds and is not known yet
    """
    config, split = load_config(source), Split(ep=ep, tp=tp)
    has_files = source.is_dir() and any((source / name).exists() for name in (INDEX_NAME, SINGLE_NAME))
    entries = read_entries(source) if has_files else None
    found = None
    if entries is not None:
        check_entries(entries, config, source)
        size = sum(entry.end - entry.begin for entry in entries.values())
        found = revision(source) if read_all or size <= _HASHED_AT_ONCE else cached_revision(source)
    shapes = model_shapes(config)
    routed = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp.experts." in name)
    num_params = sum(math.prod(shape) for shape in shapes.values())
    unused = routed * (config.n_routed_experts - config.num_experts_per_tok) // config.n_routed_experts
    return Report(
        source=source,
        config=config,
        split=split,
        layout=KvLayout(
            num_layers=config.num_hidden_layers, kv_lora_rank=config.kv_lora_rank, rope_dim=config.qk_rope_head_dim, dtype=kv_dtype
        ),
        num_params=num_params,
        num_active=num_params - unused,
        num_mtp_params=sum(math.prod(shape) for shape in mtp_shapes(config).values()),
        rank_bytes=_rank_bytes(config, split, entries),
        has_files=has_files,
        revision=found,
    )


def _rank_bytes(config: ModelConfig, split: Split, entries: dict[str, TensorEntry] | None) -> dict[str, int]:
    """Bytes of the group's first rank by part of the model, each tensor as it is stored."""
    experts, heads, mtp = split.experts(config), split.heads(config), mtp_shapes(config)
    parts: dict[str, int] = {}
    for name, shape in (model_shapes(config) | mtp).items():
        region = kept_region(config, name, shape, experts, heads)
        if region is None or (entries is not None and name not in entries):  # an MTP layer may be left out
            continue
        dtype = _published_dtype(config, name) if entries is None else entries[name].dtype
        size = region.num_values * ITEM_BYTES[dtype]
        if dtype == "F8_E4M3" and config.weight_block_size is not None:
            size += region.blocks(config.weight_block_size).num_values * ITEM_BYTES["F32"]
        part = "MTP layer" if name in mtp else _part(name)
        parts[part] = parts.get(part, 0) + size
    return parts


def _published_dtype(config: ModelConfig, name: str) -> str:
    """How a tensor is stored where only config.json is there to say so: every projection FP8, if any is, and the rest bf16.

    One differs in V3's own files: eh_proj of the MTP layer is bf16 there, which is 0.1 GB more.
    """
    if name.endswith("e_score_correction_bias"):
        return "F32"
    projection = name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    return "F8_E4M3" if projection and config.weight_block_size is not None else "BF16"


def _part(name: str) -> str:
    if name in (EMBED, HEAD):
        return "embedding and head"
    for word, part in ((".mlp.experts.", "routed experts"), (".shared_experts.", "shared experts"), (".mlp.gate.", "gates")):
        if word in name:
            return part
    return "attention" if ".self_attn." in name else "dense MLPs" if ".mlp." in name else "norms"


def describe(report: Report, gpu_memory: float | None) -> None:
    """Print the report: a table on a terminal, `key: value` lines into a pipe."""
    rows = [*_model_rows(report), *_rank_rows(report), *_kv_rows(report, gpu_memory), *_identity_rows(report)]
    if not sys.stdout.isatty():
        for key, value in rows:
            print(f"{key}: {value}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=str(report.source))
    for key, value in rows:
        table.add_row(key, value)
    Console().print(table)


def _model_rows(report: Report) -> list[tuple[str, str]]:
    config = report.config
    moe = sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))
    groups = f" in {config.n_group} groups, {config.topk_group} chosen" if config.n_group > 1 else ""
    shared = f", {config.n_shared_experts} shared" if config.n_shared_experts else ""
    stored = "FP8 in blocks of 128 x 128" if config.weight_block_size else "not quantised"
    mtp = f", and {_short(report.num_mtp_params, 'M B')} in the MTP layer" if report.num_mtp_params else ""
    gate = f"{config.scoring_func} {config.topk_method}"
    low_rank = f"q_lora {config.q_lora_rank}" if config.q_lora_rank else "no q_lora"
    return [
        ("architecture", f"{FAMILIES[config.model_type].architecture} ({config.model_type}), {stored}"),
        ("layers", f"{config.num_hidden_layers}: {config.num_hidden_layers - moe} dense, {moe} MoE; hidden {config.hidden_size}"),
        ("attention", f"{config.num_attention_heads} heads, latent {config.kv_lora_rank} + {config.qk_rope_head_dim}, {low_rank}"),
        ("experts", f"{config.num_experts_per_tok} of {config.n_routed_experts}{groups}{shared}; {gate}"),
        ("context", f"{config.max_position_embeddings:,} tokens"),
        ("parameters", f"{_short(report.num_params, 'M B')}, {_short(report.num_active, 'M B')} active{mtp}"),
    ]


def _rank_rows(report: Report) -> list[tuple[str, str]]:
    split, total = report.split, report.total_bytes
    how = "as stored" if report.has_files else "as config.json lets expect"
    rows = [(f"weights of a rank, EP{split.ep} TP{split.tp}", f"{_short(total, 'MB GB')} {how}")]
    return rows + [(f"  {part}", _short(size, "MB GB")) for part, size in report.rank_bytes.items()]


def _kv_rows(report: Report, gpu_memory: float | None) -> list[tuple[str, str]]:
    layout = report.layout
    rows = [("KV a token", f"{layout.token_bytes:,} B ({layout.dtype})"), ("KV a page", f"{layout.page_bytes:,} B")]
    for name, size in GPUS.items() if gpu_memory is None else ((f"a GPU, {gpu_memory:g} GB", gpu_memory),):
        pages = report.num_pages(size)
        tokens = pages * layout.page_bytes // layout.token_bytes
        fits = f"{pages:,} ({tokens:,} tokens), weights and pages in {USABLE:.0%}" if pages else "none: the weights alone do not fit"
        rows.append((f"pages on {name}", fits))
    return rows


def _short(number: int, units: str) -> str:
    """`number` in millions or billions, `units` naming both."""
    million, billion = units.split()
    return f"{number / 1e9:.2f} {billion}" if number >= 1e9 else f"{number / 1e6:.2f} {million}"


def _identity_rows(report: Report) -> list[tuple[str, str]]:
    if not report.has_files:
        return [("revision", "no safetensors files here")]
    if report.revision is None:
        return [("revision", "not known yet; --hash reads every byte for it")]
    return [("revision", report.revision), ("fingerprint", f"{report.fingerprint} (pages of {report.layout.dtype})")]
