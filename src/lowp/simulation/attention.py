"""Attention in plain matrix products: what torch fuses, spelled out, so that each product can be computed otherwise."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`: scores, softmax, mean of the values."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    if is_causal:
        rows, columns = query.size(-2), key.size(-2)
        attn_mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
    scores = torch.matmul(query * _scale(query, scale), key.transpose(-2, -1))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.matmul(F.dropout(scores.softmax(-1), dropout_p, dropout_p > 0), value)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.size(-1)) if scale is None else scale


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`: time first, [time, batch, features].

    1. Project queries, keys and values, and divide them among the heads.
    2. Scores of every query with every key; masked ones are -infinity; softmax.
    3. Means of the values by those weights, put together and projected once more.
    """
    if static_k is not None or static_v is not None:
        raise ValueError("attention with static keys or values has no narrow accumulators")
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    time, batch, width = query.shape
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else _thirds(in_proj_weight)
    q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, _thirds(in_proj_bias), strict=True))
    added = 0  # keys that the masks do not know
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)])
        added += 1
    if add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        added += 1
    q, k, v = (x.reshape(x.size(0), batch * num_heads, width // num_heads).transpose(0, 1) for x in (q, k, v))
    scores = torch.bmm(q * _scale(q, None), k.transpose(1, 2))
    if is_causal and key_padding_mask is None and not need_weights:  # then torch makes its own mask, over the added keys too
        attn_mask, added = torch.ones_like(scores[0], dtype=torch.bool).triu(1), 0
    mask = _mask(attn_mask, key_padding_mask, num_heads, added, scores)
    shares = (scores if mask is None else scores + mask).softmax(-1)
    dropped = F.dropout(shares, dropout_p, training)
    mixed = torch.bmm(dropped, v).transpose(0, 1).reshape(time, batch, width)
    result = F.linear(mixed, out_proj_weight, out_proj_bias)
    seen = dropped.view(batch, num_heads, time, -1) if need_weights else None
    if seen is not None and average_attn_weights:
        seen = seen.mean(1)
    return (result, seen) if batched else (result.squeeze(1), None if seen is None else seen.squeeze(0))


def _thirds(packed: Tensor | None) -> Any:
    return (None, None, None) if packed is None else packed.chunk(3)


def _mask(mask: Tensor | None, padding: Tensor | None, heads: int, added: int, scores: Tensor) -> Tensor | None:
    """What is added to the scores [batch * heads, time, keys]; True in a mask of booleans means: not to be seen."""
    masks = []
    if mask is not None:
        masks.append(_addend(mask, added, scores))
    if padding is not None:
        masks.append(_addend(padding, added, scores).repeat_interleave(heads, 0).unsqueeze(1))
    return sum(masks[1:], start=masks[0]) if masks else None


def _addend(mask: Tensor, added: int, scores: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)
    return F.pad(mask, (0, added)) if added else mask
