"""attention_stats() in one pass over the keys, as a Triton kernel for CUDA: scores only, values are never read.

A tile holds BLOCK_M (row, head) pairs of one key/value group, so a group's keys are read once, and walks over blocks of
BLOCK_N keys. Per row it keeps `top` (largest raw score), a reference `ref` = ceil(top c) in bits, c = scale log2(e),
l = sum 2^d and a = sum 2^d d with d = c score - ref. When ref rises to ref', a <- r (a + l (ref - ref')), l <- r l with
r = 2^(ref - ref'): the references are whole numbers, so r is exact, and the entropy is log l - a/l without a
difference of large numbers. Blocks that every row of the tile sees whole go without a mask, in a loop of their own;
blocks that no row sees are not visited. Masked scores and the first reference are finite: 0 x inf cannot occur.

Few rows are split over the keys; a second kernel (attention_stats_join.py) joins the parts, adds a learnable sink, and
writes what users see.
No atomics and no autotuning: equal calls on one machine give equal bits. (`no_type_check`: jaxtyping's import hook,
in the tests, would wrap the functions that Triton reads.)
"""

from __future__ import annotations

import math
from typing import no_type_check

import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # raw score of a key that is not seen
LOWEST = tl.constexpr(-1e12)  # reference of a row that has seen nothing; HIDDEN c lies far below it
LN2 = tl.constexpr(math.log(2))
PADDING = tl.constexpr(2**31 - 1)  # position of a key that is not there: later than any query
# Arguments whose value does not change the code
FREE = ["S", "R", "tiles", "blocks", "near", "sinks", "limit", "s_row", "s_qpos", "s_kpos", "s_lab"]


@triton.jit
@no_type_check
def _fold(
    x, start, marked, q_pos, k_pos, q_low, q_high, LABELS, S, c,
    top, ref, length, centred, index, distance, mass, mass_ref, histogram,
    BLOCK_N: tl.constexpr, TOP1: tl.constexpr, DISTANCE: tl.constexpr, SETS: tl.constexpr, BINS: tl.constexpr,
    LEFTMOST: tl.constexpr,
):  # fmt: skip
    """Take a block of raw scores x [M,N] of the keys from `start` on into the running sums."""
    if TOP1 == 1:  # value and index travel together
        high, at = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=LEFTMOST)
        index = tl.where(high > top, start + at, index)
    else:
        high = tl.max(x, 1)
        if TOP1 == 2:  # look for the key only where some row's maximum rises
            rises = high > top
            if tl.max(rises.to(tl.int32), 0) > 0:
                columns = tl.arange(0, BLOCK_N)
                at = tl.max(tl.where(x == high[:, None], columns[None, :], -1), 1)
                index = tl.where(rises, start + at, index)
    top = tl.maximum(top, high)
    raised = tl.maximum(ref, tl.ceil(top * c))
    d = tl.fma(x, tl.full(x.shape, c, tl.float32), tl.broadcast_to(-raised[:, None], x.shape))
    p = tl.exp2(d)
    step = ref - raised
    r = tl.exp2(step)
    centred = r * (centred + length * step) + tl.sum(p * d, 1)
    length = r * length + tl.sum(p, 1)
    if DISTANCE:
        back = q_pos.to(tl.float32)[:, None] - k_pos.to(tl.float32)[None, :]
        distance = r * distance + tl.sum(p * back, 1)
    if SETS > 0:  # noqa: SIM102 (a constexpr and a value: two ifs)
        if marked != 0:  # blocks without a label pay for this test only
            columns = start + tl.arange(0, BLOCK_N)
            bits = tl.load(LABELS + columns, mask=columns < S, other=0).to(tl.int32)
            which = tl.arange(0, mass.shape[1])
            mass *= tl.exp2(mass_ref - raised)[:, None]
            for n in tl.static_range(SETS):
                part = tl.sum(tl.where(((bits >> n) & 1)[None, :] != 0, p, 0.0), 1)
                mass += tl.where(which[None, :] == n, part[:, None], 0.0)
            mass_ref = raised
    if BINS > 0:
        back = q_pos[:, None] - k_pos[None, :]
        bins = tl.where(back < 1, 0, (back.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126)
        nearest = tl.maximum(q_low - tl.max(k_pos, 0), 0).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        farthest = tl.maximum(q_high - tl.min(k_pos, 0), 0).to(tl.float32).to(tl.int32, bitcast=True) >> 23
        which = tl.arange(0, histogram.shape[1])
        histogram *= r[:, None]
        for n in range(tl.maximum(nearest - 126, 0), tl.maximum(farthest - 126, 0) + 1):
            part = tl.sum(tl.where(bins == n, p, 0.0), 1)
            histogram += tl.where(which[None, :] == n, part[:, None], 0.0)
    return top, raised, length, centred, index, distance, mass, mass_ref, histogram


@triton.jit
@no_type_check
def _scores(
    q1, q2, K, start, S, s_k, squeeze,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Raw scores of a block of keys, [M,N] in fp32: products, or tanh of them where softcap squeezes."""
    n = tl.arange(0, BLOCK_N)
    d1 = tl.arange(0, D1)
    at = K + start.to(tl.int64) * s_k
    seen = (n[:, None] < S - start) & (d1[None, :] < D)
    if WHOLE:
        if D1 <= D:
            k1 = tl.load(at + n[:, None] * s_k + d1[None, :])
        else:
            k1 = tl.load(at + n[:, None] * s_k + d1[None, :], mask=d1[None, :] < D, other=0.0)
    else:
        k1 = tl.load(at + n[:, None] * s_k + d1[None, :], mask=seen, other=0.0)
    if UPCAST:
        k1 = k1.to(tl.float32)
    x = tl.dot(q1, tl.trans(k1), input_precision="ieee")
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        if WHOLE:
            k2 = tl.load(at + n[:, None] * s_k + d2[None, :], mask=d2[None, :] < D, other=0.0)
        else:
            k2 = tl.load(
                at + n[:, None] * s_k + d2[None, :], mask=(n[:, None] < S - start) & (d2 < D)[None, :], other=0.0
            )
        if UPCAST:
            k2 = k2.to(tl.float32)
        x = tl.dot(q2, tl.trans(k2), x, input_precision="ieee")
    if SOFTCAP:
        y = x * squeeze
        e = tl.exp2(tl.abs(y) * (-2.0 / LN2))
        large = tl.where(y < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        w = y * y
        small = y * (1.0 + w * (-1.0 / 3 + w * (2.0 / 15 - w * (17.0 / 315))))
        x = tl.where(w < 0.01, small, large)
    return x


@triton.jit
@no_type_check
def _scan(
    LOW, HIGH, SEG_LOW, SEG_HIGH, blocks, q_low, q_high, seg_low, seg_high, near, sinks, limit,
    CAUSAL: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """From the range of positions and segments of every key block: [first, last) that rows of this tile may see,
    [sink_first, sink_last) before it that holds sinks, and [whole_first, whole_last) that every row sees whole."""
    first, last, sink_first, sink_last = blocks, blocks * 0, blocks, blocks * 0
    whole_first, whole_last, count = blocks, blocks * 0, blocks * 0
    for start in range(0, blocks, 128):
        n = start + tl.arange(0, 128)
        there = n < blocks
        low = tl.load(LOW + n, mask=there, other=PADDING)
        high = tl.load(HIGH + n, mask=there, other=PADDING)
        if CAUSAL:
            may = low <= q_high
            whole = (high <= q_low) & (low > q_high - near)
        else:
            may = low != PADDING
            whole = high != PADDING
        if SEGMENTS:
            s_low = tl.load(SEG_LOW + n, mask=there, other=0)
            s_high = tl.load(SEG_HIGH + n, mask=there, other=0)
            may = may & (s_low <= seg_high) & (s_high >= seg_low)
            whole = whole & (s_low == seg_high) & (s_high == seg_low)
        whole = whole & may
        sink = may & (low < sinks) & (high > q_low - limit)
        if CAUSAL:
            may = may & (high > q_low - near)
            whole = whole & (low > q_high - limit)
        first = tl.minimum(first, tl.min(tl.where(may, n, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(may, n + 1, 0), 0))
        sink_first = tl.minimum(sink_first, tl.min(tl.where(sink, n, blocks), 0))
        sink_last = tl.maximum(sink_last, tl.max(tl.where(sink, n + 1, 0), 0))
        whole_first = tl.minimum(whole_first, tl.min(tl.where(whole, n, blocks), 0))
        whole_last = tl.maximum(whole_last, tl.max(tl.where(whole, n + 1, 0), 0))
        count += tl.sum(whole.to(tl.int32), 0)
    last = tl.maximum(last, sink_last)
    sink_last = tl.minimum(sink_last, first)
    apart = (count == 0) | (count != whole_last - whole_first)  # no one range: mask them all
    whole_first = tl.where(apart, first, whole_first)
    whole_last = tl.where(apart, first, whole_last)
    return first, last, sink_first, sink_last, whole_first, whole_last


@triton.jit(do_not_specialize=FREE)
@no_type_check
def stats_kernel(
    Q, K, ROWS, Q_POS, K_POS, Q_SEG, K_SEG, LOW, HIGH, SEG_LOW, SEG_HIGH, LABELS, LABELLED,
    TOP, LENGTH, CENTRED, COUNT, INDEX, DISTANCES, MASS, HISTOGRAM,
    S, R, G, B, tiles, blocks, s_qb, s_qt, s_qh, s_kb, s_ks, s_kg, s_row, s_qpos, s_kpos, s_lab,
    c, squeeze, near, sinks, limit,
    GROUP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, CAUSAL: tl.constexpr, CHOSEN: tl.constexpr,
    BAND: tl.constexpr, POSITIONS: tl.constexpr, SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, TOP1: tl.constexpr,
    DISTANCE: tl.constexpr, SETS: tl.constexpr, SETS2: tl.constexpr, BINS: tl.constexpr, BINS2: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Running sums of one tile of (row, head) pairs over its share of the keys; outputs [SPLITS,B,R,H(,n)]."""
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # late rows see the most keys: first
    bg = (program // tiles) % (B * G)
    split = program // (tiles * B * G)
    b = (bg // G).to(tl.int64)
    g = bg % G
    flat = tile.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = flat < R.to(tl.int64) * GROUP
    flat = tl.minimum(flat, R.to(tl.int64) * GROUP - 1)  # the rest repeats the last pair, and is not stored
    place = flat // GROUP
    head = g * GROUP + flat % GROUP
    row = place
    if CHOSEN:
        row = tl.load(ROWS + b * s_row + place).to(tl.int64)
    d1 = tl.arange(0, D1)
    q_at = Q + b * s_qb + (row * s_qt + head * s_qh)[:, None]
    q1 = tl.load(q_at + d1[None, :], mask=d1[None, :] < D, other=0.0)
    if UPCAST:
        q1 = q1.to(tl.float32)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_at + d2[None, :], mask=d2[None, :] < D, other=0.0)
        if UPCAST:
            q2 = q2.to(tl.float32)
    K += b * s_kb + g.to(tl.int64) * s_kg
    LABELS += b * s_lab
    LABELLED += b * blocks
    K_POS += b * s_kpos
    K_SEG += b * s_kpos
    q_pos = row.to(tl.int32)
    q_seg = q_pos * 0
    if POSITIONS:
        q_pos = tl.load(Q_POS + b * s_qpos + row)
    if SEGMENTS:
        q_seg = tl.load(Q_SEG + b * s_qpos + row)
    q_low = tl.min(q_pos, 0)
    q_high = tl.max(q_pos, 0)

    # Which blocks: [first, last), sinks before it, and inside it [whole_first, whole_last) without a mask
    if POSITIONS:
        first, last, sink_first, sink_last, whole_first, whole_last = _scan(
            LOW + b * blocks, HIGH + b * blocks, SEG_LOW + b * blocks, SEG_HIGH + b * blocks, blocks,
            q_low, q_high, tl.min(q_seg, 0), tl.max(q_seg, 0), near, sinks, limit, CAUSAL, SEGMENTS,
        )  # fmt: skip
    elif CAUSAL:
        last = q_high // BLOCK_N + 1
        first = tl.maximum(q_low - near + 1, 0) // BLOCK_N
        sink_first = tl.maximum(q_low - limit + 1, 0) // BLOCK_N
        sink_last = tl.minimum((tl.minimum(sinks, q_high + 1) + BLOCK_N - 1) // BLOCK_N, first)
        whole_first = (tl.maximum(q_high - near + 1, 0) + BLOCK_N - 1) // BLOCK_N
        whole_last = (q_low + 1) // BLOCK_N
        whole_first = tl.minimum(whole_first, last)
        whole_last = tl.maximum(whole_last, whole_first)
    else:
        first = blocks * 0
        last = blocks
        sink_first = first
        sink_last = first
        whole_first = first
        whole_last = S // BLOCK_N

    top = tl.full([BLOCK_M], HIDDEN, tl.float32)
    ref = tl.full([BLOCK_M], LOWEST, tl.float32)
    length = tl.zeros([BLOCK_M], tl.float32)
    centred = tl.zeros([BLOCK_M], tl.float32)
    count = tl.zeros([BLOCK_M], tl.int32)
    index = tl.zeros([BLOCK_M], tl.int32)
    distance = tl.zeros([BLOCK_M], tl.float32)
    mass = tl.zeros([BLOCK_M, SETS2], tl.float32)
    mass_ref = tl.full([BLOCK_M], LOWEST, tl.float32)
    histogram = tl.zeros([BLOCK_M, BINS2], tl.float32)
    n = tl.arange(0, BLOCK_N)

    n1 = tl.maximum(sink_last - sink_first, 0)
    n2 = n1 + tl.maximum(whole_first - first, 0)
    masked = n2 + tl.maximum(last - whole_last, 0)
    for t in tl.range(masked * split // SPLITS, masked * (split + 1) // SPLITS):
        block = tl.where(t < n1, sink_first + t, tl.where(t < n2, first + t - n1, whole_last + t - n2))
        start = block * BLOCK_N
        marked = tl.load(LABELLED + block) if SETS > 0 else block  # long before it is asked for
        x = _scores(q1, q2, K, start, S, s_ks, squeeze, D, D1, D2, BLOCK_N, False, SOFTCAP, UPCAST)
        columns = start + n
        k_pos = columns
        if POSITIONS:
            k_pos = tl.load(K_POS + columns, mask=columns < S, other=PADDING)
        if CAUSAL:
            seen = k_pos[None, :] <= q_pos[:, None]
            if BAND:
                near_enough = (k_pos[None, :] > (q_pos - near)[:, None]) | (k_pos < sinks)[None, :]
                seen = seen & near_enough & (k_pos[None, :] > (q_pos - limit)[:, None])
        elif POSITIONS:
            seen = tl.broadcast_to((k_pos != PADDING)[None, :], (BLOCK_M, BLOCK_N))
        else:
            seen = tl.broadcast_to((columns < S)[None, :], (BLOCK_M, BLOCK_N))
        if SEGMENTS:
            k_seg = tl.load(K_SEG + columns, mask=columns < S, other=0)
            seen = seen & (q_seg[:, None] == k_seg[None, :])
        x = tl.where(seen, x, HIDDEN)
        count += tl.sum((x > HIDDEN).to(tl.int32), 1)
        top, ref, length, centred, index, distance, mass, mass_ref, histogram = _fold(
            x, start, marked, q_pos, k_pos, q_low, q_high, LABELS, S, c,
            top, ref, length, centred, index, distance, mass, mass_ref, histogram,
            BLOCK_N, TOP1, DISTANCE, SETS, BINS, UPCAST,
        )  # fmt: skip

    whole = whole_last - whole_first
    begin = whole_first + (whole * split // SPLITS)
    end = whole_first + (whole * (split + 1) // SPLITS)
    for block in tl.range(begin, end):
        start = block * BLOCK_N
        marked = tl.load(LABELLED + block) if SETS > 0 else block  # long before it is asked for
        x = _scores(q1, q2, K, start, S, s_ks, squeeze, D, D1, D2, BLOCK_N, True, SOFTCAP, UPCAST)
        k_pos = start + n
        if POSITIONS and (DISTANCE or BINS > 0):
            k_pos = tl.load(K_POS + start + n)
        top, ref, length, centred, index, distance, mass, mass_ref, histogram = _fold(
            x, start, marked, q_pos, k_pos, q_low, q_high, LABELS, S, c,
            top, ref, length, centred, index, distance, mass, mass_ref, histogram,
            BLOCK_N, TOP1, DISTANCE, SETS, BINS, UPCAST,
        )  # fmt: skip
    count += (end - begin) * BLOCK_N

    out = ((split.to(tl.int64) * B + b) * R + place) * (G * GROUP) + head
    tl.store(TOP + out, top, mask=real)
    tl.store(LENGTH + out, length, mask=real)
    tl.store(CENTRED + out, centred, mask=real)
    tl.store(COUNT + out, count, mask=real)
    if TOP1 > 0:
        tl.store(INDEX + out, index, mask=real)
    if DISTANCE:
        tl.store(DISTANCES + out, distance, mask=real)
    if SETS > 0:
        which = tl.arange(0, SETS2)
        mass *= tl.exp2(mass_ref - ref)[:, None]
        tl.store(MASS + out[:, None] * SETS + which[None, :], mass, mask=real[:, None] & (which < SETS)[None, :])
    if BINS > 0:
        which = tl.arange(0, BINS2)
        tl.store(
            HISTOGRAM + out[:, None] * BINS + which[None, :], histogram, mask=real[:, None] & (which < BINS)[None, :]
        )
