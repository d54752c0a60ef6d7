"""Linear attention of a block's queries over the block of keys before it, as a Triton kernel for CUDA.

    out[n, t] = base[n, t] + q_scale[n, t] sum over i > t of k_scale[n-1, i] (q[n, t] . k[n-1, i]) v[n-1, i]

t and i count inside their blocks: the keys of the earlier block that a window as long as a block still holds. A program
has one block, one head and BLOCK_V value channels; it walks over chunks from the last one to the first with the state
sum k v^T of the chunks behind it, in fp32. Reading the other way round (`LATER` false, i < t, and the keys of the block
after) makes the same kernel its own gradients.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _rows(X, b, n, h, rows, s_b, s_n, s_w, s_h, W, REVERSED: tl.constexpr):  # fmt: skip
    """Pointers to the rows of block n and head h; `REVERSED`: they are stored last token first."""
    at = (W - 1 - rows) if REVERSED else rows
    return X + b * s_b + n * s_n + h * s_h + at[:, None].to(tl.int64) * s_w


@triton.jit
@no_type_check
def earlier_block_kernel(
    Q, K, V, Q_SCALE, K_SCALE, BASE, OUT, N, KEY_BLOCKS, W, H, shift,
    q_b, q_n, q_w, q_h, k_b, k_n, k_w, k_h, v_b, v_n, v_w, v_h, base_b, base_n, base_w, base_h, o_b, o_n, o_w, o_h,
    qs_b, qs_n, qs_w, qs_h, ks_b, ks_n, ks_w, ks_h,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    LATER: tl.constexpr, ADD: tl.constexpr, SCALE_Q: tl.constexpr, SCALE_K: tl.constexpr, Q_REVERSED: tl.constexpr,
    K_REVERSED: tl.constexpr, V_REVERSED: tl.constexpr, O_REVERSED: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of queries, one head, BLOCK_V channels of the values."""
    program = tl.program_id(0)
    h = (program % H).to(tl.int64)
    n = ((program // H) % N).to(tl.int64)
    b = (program // H // N).to(tl.int64)
    m = n + shift  # the block of keys
    there = (m >= 0) & (m < KEY_BLOCKS)  # the first block has none before it
    dk = tl.arange(0, BLOCK_K)
    dv = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    chunks = (W + CHUNK - 1) // CHUNK
    for c in range(chunks):
        rows = ((chunks - 1 - c) if LATER else c) * CHUNK + i
        held = (rows < W)[:, None]
        keyed = held & there & (dk < DK)[None, :]
        valued = held & there & (dv < DV)[None, :]
        q = tl.load(_rows(Q, b, n, h, rows, q_b, q_n, q_w, q_h, W, Q_REVERSED) + dk[None, :], mask=keyed, other=0.0)
        k = tl.load(_rows(K, b, m, h, rows, k_b, k_n, k_w, k_h, W, K_REVERSED) + dk[None, :], mask=keyed, other=0.0)
        v = tl.load(_rows(V, b, m, h, rows, v_b, v_n, v_w, v_h, W, V_REVERSED) + dv[None, :], mask=valued, other=0.0)
        if UPCAST:
            q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
        if SCALE_K:
            at = _rows(K_SCALE, b, m, h, rows, ks_b, ks_n, ks_w, ks_h, W, False)
            v = (v.to(tl.float32) * tl.load(at, mask=held & there, other=0.0)).to(v.dtype)
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        seen = (i[None, :] > i[:, None]) if LATER else (i[None, :] < i[:, None])
        weights = tl.where(seen, weights, 0.0)
        out = tl.dot(q, state.to(q.dtype), input_precision=PRECISION)
        if SCALE_Q:  # before 16 bits have to hold what it makes small
            by = tl.load(_rows(Q_SCALE, b, n, h, rows, qs_b, qs_n, qs_w, qs_h, W, False), mask=held, other=0.0)
            weights *= by
            out *= by
        out = tl.dot(weights.to(v.dtype), v, out, input_precision=PRECISION)
        state = tl.dot(tl.trans(k), v, state, input_precision=PRECISION)
        kept = held & (dv < DV)[None, :]
        if ADD:
            at = _rows(BASE, b, n, h, rows, base_b, base_n, base_w, base_h, W, False)
            out += tl.load(at + dv[None, :], mask=kept, other=0.0).to(tl.float32)
        tl.store(_rows(OUT, b, n, h, rows, o_b, o_n, o_w, o_h, W, O_REVERSED) + dv[None, :], out, mask=kept)
