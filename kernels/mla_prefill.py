"""Multi-head attention of a ragged batch of prompt chunks, in parts that are merged by their natural log-sum-exps."""

from collections.abc import Sequence

import torch

from kernels.backend import Backend, select

_MAX_SCORES = 1 << 22
"""Elements of one block of scores (16 MB in fp32): queries are taken in blocks so small that a long chunk needs no more memory."""
_QUERY_BLOCK = 128  # measured for 4 heads and 2,000 tokens: 64 rows 68 ms, 128 rows 66, 256 rows 70, 512 rows 91


def mla_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    psum_q: Sequence[int],
    psum_k: Sequence[int],
    *,
    softmax_scale: float,
    causal: bool,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend within each sequence of a ragged batch: sequence i has queries psum_q[i]:psum_q[i + 1] and keys psum_k[i]:psum_k[i + 1].

    q        [num_queries, num_heads, qk_dim]
    k        [num_keys, num_heads, qk_dim]
    v        [num_keys, num_heads, v_dim]
    causal   sequences have as many keys as queries, and query j sees the keys 0..j; otherwise a query sees all keys
    returns  out [num_queries, num_heads, v_dim], lse [num_queries, num_heads]: the natural logarithm of the sum of
             exp(scores); out 0 and lse -inf where a sequence has no keys
    """
    assert q.shape[0] == psum_q[-1] and k.shape[0] == v.shape[0] == psum_k[-1], f"{q.shape=} {k.shape=} {v.shape=} {psum_q=} {psum_k=}"
    assert len(psum_q) == len(psum_k) and (not causal or list(psum_q) == list(psum_k)), f"{psum_q=} {psum_k=} {causal=}"
    return select(IMPLEMENTATIONS, backend)(q, k, v, psum_q, psum_k, softmax_scale, causal)


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    out  [num_queries, num_heads, v_dim], lse [num_queries, num_heads] as `mla_prefill` returns them (natural logarithms);
    at least one side of each pair must have keys
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse).exp().unsqueeze(-1), (lse_b - lse).exp().unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse


def mla_prefill_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, psum_q: Sequence[int], psum_k: Sequence[int], softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query by query."""
    out, lse = q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), q.new_full(q.shape[:2], -torch.inf)
    for i in range(len(psum_q) - 1):
        for row in range(psum_q[i], psum_q[i + 1]):
            end = psum_k[i] + row - psum_q[i] + 1 if causal else psum_k[i + 1]
            keys, values = k[psum_k[i] : end], v[psum_k[i] : end]
            if len(keys):
                scores = (q[row] * keys).sum(dim=-1) * softmax_scale  # [num_keys, num_heads]
                lse[row] = scores.exp().sum(dim=0).log()
                out[row] = ((scores - lse[row]).exp().unsqueeze(-1) * values).sum(dim=0)
    return out, lse


def mla_prefill_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, psum_q: Sequence[int], psum_k: Sequence[int], softmax_scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A loop over sequences and blocks of queries; a causal block multiplies with no key behind its last query."""
    out, lse = q.new_zeros(q.shape[0], q.shape[1], v.shape[2]), q.new_full(q.shape[:2], -torch.inf)
    heads_q, heads_k, heads_v = q.transpose(0, 1), k.permute(1, 2, 0), v.transpose(0, 1)  # [h, q, d], [h, d, k], [h, k, v]
    for i in range(len(psum_q) - 1):
        num_keys = psum_k[i + 1] - psum_k[i]
        block = max(16, min(_QUERY_BLOCK, _MAX_SCORES // max(1, num_keys * q.shape[1])))
        for start in range(psum_q[i], psum_q[i + 1], block) if num_keys else ():
            stop = min(start + block, psum_q[i + 1])
            end = psum_k[i] + stop - psum_q[i] if causal else psum_k[i + 1]
            scores = torch.bmm(heads_q[:, start:stop] * softmax_scale, heads_k[:, :, psum_k[i] : end])  # [h, block, keys]
            if causal and stop - start > 1:
                scores[:, :, start - stop :] += scores.new_full((stop - start, stop - start), -torch.inf).triu_(1)
            best = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(best).exp_()
            total = weights.sum(dim=-1, keepdim=True)  # [h, block, 1]
            out[start:stop] = torch.bmm(weights, heads_v[:, psum_k[i] : end]).div_(total).transpose(0, 1)
            lse[start:stop] = (best + total.log()).squeeze(-1).t()
    return out, lse


IMPLEMENTATIONS = {"torch": mla_prefill_torch, "reference": mla_prefill_reference}
