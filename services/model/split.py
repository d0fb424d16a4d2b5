"""Which part of each checkpoint tensor a rank keeps: its experts (EP), its heads (TP). Shared by loader and doctor; no torch.

Heads are sharded where they are made and where they end (q_b or q, kv_b, o), and nothing else of attention is: the latent is
one for all heads. After o_proj each TP rank owns 1/TP of the tokens and not of the columns, so the dense and shared MLPs,
gate, norms, embedding and head work on whole rows and stand whole on every rank. Experts are spread over all ranks of
the EP group, which is DP x TP, in runs of neighbours.
"""

from dataclasses import dataclass

from services.model.config import ModelConfig
from services.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A rank's place: number `ep_rank` of the `ep` that share the experts, `tp_rank` of the `tp` that share the heads."""

    ep_rank: int = 0
    ep: int = 1
    tp_rank: int = 0
    tp: int = 1

    def experts(self, config: ModelConfig) -> range:
        """The routed experts that the rank keeps in every MoE layer; raises ConfigError when they do not divide."""
        return _share("ep", self.ep_rank, self.ep, "n_routed_experts", config.n_routed_experts)

    def heads(self, config: ModelConfig) -> range:
        """The attention heads that the rank keeps in every layer; raises ConfigError when they do not divide."""
        return _share("tp", self.tp_rank, self.tp, "num_attention_heads", config.num_attention_heads)


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a stored tensor; one with a single dimension is a single row."""

    rows: range
    columns: range

    @property
    def num_values(self) -> int:
        """Elements inside."""
        return len(self.rows) * len(self.columns)

    def blocks(self, block: tuple[int, int]) -> "Region":
        """The block scales that the region needs, as a rectangle of the scale tensor: a cut block's scale is needed on both sides."""
        return Region(_blocks(self.rows, block[0]), _blocks(self.columns, block[1]))


def kept_region(config: ModelConfig, name: str, shape: tuple[int, ...], experts: range, heads: range) -> Region | None:
    """What a rank with these experts and heads keeps of the tensor `name`, None for nothing."""
    if ".mlp.experts." in name and int(name.split(".mlp.experts.")[1].split(".")[0]) not in experts:
        return None
    rows, columns = (range(1), range(shape[0])) if len(shape) == 1 else (range(shape[0]), range(shape[1]))
    if name.endswith((".q_b_proj.weight", ".q_proj.weight")):
        rows = _scaled(heads, config.qk_head_dim)
    elif name.endswith(".kv_b_proj.weight"):
        rows = _scaled(heads, config.qk_nope_head_dim + config.v_head_dim)
    elif name.endswith(".o_proj.weight"):
        columns = _scaled(heads, config.v_head_dim)
    return Region(rows, columns)


def _share(what: str, rank: int, size: int, key: str, number: int) -> range:
    if size < 1 or number % size:
        raise ConfigError(f"{what} is {size} but it must divide {key} ({number})")
    if not 0 <= rank < size:
        raise ConfigError(f"{what}_rank is {rank} but ranks go from 0 to {what} - 1 ({size - 1})")
    return range(rank * number // size, (rank + 1) * number // size)


def _scaled(heads: range, width: int) -> range:
    return range(heads.start * width, heads.stop * width)


def _blocks(values: range, block: int) -> range:
    return range(values.start // block, -(-values.stop // block))
