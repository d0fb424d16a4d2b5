"""DeepSeek-V3's network for training: plain torch, whole sequences, no KV cache. Serving code shares nothing with it.

Parameters carry the published names, except that the routed experts of a layer are stacked ([num_experts, rows, columns]) so that one
batched product computes them all; `export.py` takes them apart. b = batch, n = tokens of a sequence, d = hidden, E = routed experts.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deploy.demo_model.fp8 import BLOCK, dequantize_blocks, quantize_blocks


def demo_config(vocab_size: int) -> dict[str, Any]:
    """The model's `config.json`: V3's own keys, its real latent (512 + 64), everything else small."""
    yarn = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024, "beta_fast": 32, "beta_slow": 1}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16", "vocab_size": vocab_size,
        "hidden_size": 256, "num_hidden_layers": 8, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "intermediate_size": 768, "moe_intermediate_size": 128, "hidden_act": "silu", "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "ep_size": 1,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096, "rope_theta": 10000, "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rms_norm_eps": 1e-6, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "use_cache": True, "quantization_config": quantization,
    }  # fmt: skip


class Weight(nn.Module):
    """One matrix, or a stack of them, that is stored in FP8. With `fake_quant` on, forwards see the rounded values, gradients pass by."""

    def __init__(self, *shape: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * std)
        self.fake_quant = False

    def value(self) -> Tensor:
        if not self.fake_quant:
            return self.weight
        with torch.no_grad():
            error = dequantize_blocks(*quantize_blocks(self.weight)) - self.weight
        return self.weight + error

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.value())


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


def yarn_inv_freq(config: dict[str, Any]) -> Tensor:
    """[rope_dim / 2] angular frequencies: interpolated by `factor` where a period exceeds the original context, kept where it is short."""
    dim, base, scaling = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]

    def dim_of(rotations: float) -> float:
        return dim * math.log(scaling["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dim_of(scaling["beta_fast"])), 0), min(math.ceil(dim_of(scaling["beta_slow"])), dim - 1)
    extrapolated = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return extrapolated / scaling["factor"] * ramp + extrapolated * (1 - ramp)


def softmax_scale(config: dict[str, Any]) -> float:
    """1/sqrt(qk dim), times mscale_all_dim's mscale squared. cos and sin need no factor here: mscale = mscale_all_dim."""
    scaling = config["rope_scaling"]
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * mscale**2


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """x [b, heads, n, rope_dim], neighbours (2i, 2i+1) are a pair; angle [n, rope_dim / 2]."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """MLA in its multi-head form: latents are expanded to keys and values."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        d, eps, self.heads = config["hidden_size"], config["rms_norm_eps"], config["num_attention_heads"]
        self.nope, self.rope, self.v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        self.lora, self.dropout, self.scale = config["kv_lora_rank"], dropout, softmax_scale(config)
        self.q_a_proj = Weight(config["q_lora_rank"], d)
        self.q_a_layernorm = RMSNorm(config["q_lora_rank"], eps)
        self.q_b_proj = Weight(self.heads * (self.nope + self.rope), config["q_lora_rank"])
        self.kv_a_proj_with_mqa = Weight(self.lora + self.rope, d)
        self.kv_a_layernorm = RMSNorm(self.lora, eps)
        self.kv_b_proj = Weight(self.heads * (self.nope + self.v), self.lora)
        self.o_proj = Weight(d, self.heads * self.v, std=0.02 / math.sqrt(2 * config["num_hidden_layers"]))

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.lora, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        k_nope, v = kv.split([self.nope, self.v], dim=-1)  # [b, heads, n, 128] each
        k_rope = rotate(k_rope.unsqueeze(1), angle).expand(-1, self.heads, -1, -1)
        q, k = torch.cat((q_nope, rotate(q_rope, angle)), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
        # Fused attention wants equal widths of keys and values.
        v = F.pad(v, (0, self.nope + self.rope - self.v))
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, dropout_p=dropout)
        return self.o_proj(out[..., : self.v].transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, d: int, inter: int, std_out: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = Weight(inter, d), Weight(inter, d), Weight(d, inter, std=std_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """V3's router. The correction bias takes part in choosing only and is moved by `balance`, not by gradients."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.top_k, self.groups, self.topk_group = config["num_experts_per_tok"], config["n_group"], config["topk_group"]
        self.factor = config["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.randn(config["n_routed_experts"], config["hidden_size"]) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config["n_routed_experts"]))
        self.register_buffer("load", torch.zeros(config["n_routed_experts"]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> weights [..., E] fp32, zero where an expert is not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            biased = scores + self.e_score_correction_bias
            by_group = biased.unflatten(-1, (self.groups, -1))
            group_idx = by_group.topk(2, dim=-1).values.sum(dim=-1).topk(self.topk_group, dim=-1).indices
            kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, group_idx, True).unsqueeze(-1)
            topk_idx = by_group.masked_fill(~kept, -math.inf).flatten(-2).topk(self.top_k, dim=-1).indices
            chosen = torch.zeros_like(scores).scatter(-1, topk_idx, 1.0)
            if self.training:
                self.load += chosen.flatten(0, -2).sum(dim=0)
        weights = scores * chosen
        return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * self.factor

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Moves each bias by `speed` towards an even load, then starts a new count."""
        self.e_score_correction_bias += speed * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Moe(nn.Module):
    """Computes every expert for every token: four times the needed work, but a few large products instead of many small ones."""

    def __init__(self, config: dict[str, Any], std_out: float) -> None:
        super().__init__()
        d, inter, num_experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
        self.gate = Gate(config)
        self.gate_proj, self.up_proj = Weight(num_experts, inter, d), Weight(num_experts, inter, d)
        self.down_proj = Weight(num_experts, d, inter, std=std_out)
        self.shared_experts = Mlp(d, inter * config["n_shared_experts"], std_out)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)  # [b * n, d]
        weights = self.gate(flat)
        gate, up = (F.linear(flat, w.value().flatten(0, 1)) for w in (self.gate_proj, self.up_proj))  # [b * n, E * inter]
        inner = (F.silu(gate) * up).unflatten(-1, (weights.shape[-1], -1)) * weights.unsqueeze(-1).to(gate.dtype)
        down = self.down_proj.value().transpose(0, 1).flatten(1)  # [d, E * inter]
        return self.shared_experts(x) + F.linear(inner.flatten(1), down).view_as(x)


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], idx: int, dropout: float) -> None:
        super().__init__()
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        std_out = 0.02 / math.sqrt(2 * config["num_hidden_layers"])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.self_attn = Attention(config, dropout)
        dense = idx < config["first_k_dense_replace"]
        self.mlp = Mlp(d, config["intermediate_size"], std_out) if dense else Moe(config, std_out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), angle))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class MtpLayer(Layer):
    """Predicts token i + 2 from (hidden state i after the model's final norm, embedding of token i + 1), at position i."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__(config, config["num_hidden_layers"], dropout)
        d, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm = RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = nn.Linear(2 * d, d, bias=False)
        nn.init.normal_(self.eh_proj.weight, std=0.02)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(d, eps)})

    def draft(self, embedded: Tensor, hidden: Tensor, angle: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.shared_head["norm"](self.forward(x, angle))


class Decoder(nn.Module):
    """What is published under `model.`; the last of `layers` is the MTP layer."""

    def __init__(self, config: dict[str, Any], dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        layers = [Layer(config, idx, dropout) for idx in range(config["num_hidden_layers"])]
        self.layers = nn.ModuleList([*layers, MtpLayer(config, dropout)])
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def decoder_layers(self) -> list[nn.Module]:
        return list(self.layers)[:-1]

    def mtp_layer(self) -> MtpLayer:
        layer = self.layers[-1]
        assert isinstance(layer, MtpLayer)
        return layer


class Net(nn.Module):
    """The whole model. Layer `num_hidden_layers` is the MTP layer, as in the published checkpoints."""

    inv_freq: Tensor

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dropout)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("inv_freq", yarn_inv_freq(config), persistent=False)

    def _angle(self, num_tokens: int) -> Tensor:
        """[num_tokens, rope_dim / 2] rotation of each position."""
        return torch.arange(num_tokens, device=self.inv_freq.device).unsqueeze(1) * self.inv_freq

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [b, n] -> hidden states after the final norm [b, n, d]."""
        x, angle = self.dropout(self.model.embed_tokens(ids)), self._angle(ids.shape[1])
        for layer in self.model.decoder_layers():
            x = layer(x, angle)
        return self.model.norm(x)

    def mtp_hidden(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """hidden [b, n, d] of tokens i, next_ids [b, n] = tokens i + 1 -> states from which `logits` predicts tokens i + 2."""
        embedded = self.dropout(self.model.embed_tokens(next_ids))
        return self.model.mtp_layer().draft(embedded, hidden, self._angle(next_ids.shape[1]))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def gates(self) -> list[Gate]:
        return [module for module in self.modules() if isinstance(module, Gate)]

    def set_fake_quant(self, on: bool) -> None:
        for module in self.modules():
            if isinstance(module, Weight):
                module.fake_quant = on
