"""The second kernel of attention_stats() on CUDA: from attention_stats_triton.py's running sums to what users see."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from .attention_stats_triton import HIDDEN, LN2, LOWEST

NO_SINK = tl.constexpr(-1e30)  # the logit of a sink that is none (-inf), in finite numbers


@triton.jit(do_not_specialize=["n"])
@no_type_check
def join_kernel(
    TOP, LENGTH, CENTRED, COUNT, INDEX, DISTANCES, MASS, HISTOGRAM, SINKS,
    LSE, ENTROPY, VISIBLE, TOP1_KEY, TOP1_PROB, DISTANCE_OUT, SINK_MASS, MASS_OUT, HISTOGRAM_OUT,
    n, H, c,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SINK: tl.constexpr, TOP1: tl.constexpr, DISTANCE: tl.constexpr,
    SETS: tl.constexpr, SETS2: tl.constexpr, BINS: tl.constexpr, BINS2: tl.constexpr,
):  # fmt: skip
    """Join the parts of each of n (row, head) pairs in order, and divide."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < n
    sets = tl.arange(0, SETS2)
    bins = tl.arange(0, BINS2)
    top = tl.full([BLOCK], HIDDEN, tl.float32)
    ref = tl.full([BLOCK], LOWEST, tl.float32)
    length = tl.zeros([BLOCK], tl.float32)
    centred = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    index = tl.zeros([BLOCK], tl.int32)
    distance = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK, SETS2], tl.float32)
    histogram = tl.zeros([BLOCK, BINS2], tl.float32)
    for s in range(SPLITS):
        part = at + s * n.to(tl.int64)
        new_top = tl.load(TOP + part, mask=real, other=HIDDEN)
        if TOP1 > 0:
            index = tl.where(new_top > top, tl.load(INDEX + part, mask=real, other=0), index)
        its_ref = tl.maximum(tl.ceil(new_top * c), LOWEST)
        top = tl.maximum(top, new_top)
        raised = tl.maximum(ref, its_ref)
        r = tl.exp2(ref - raised)
        w = tl.exp2(its_ref - raised)
        its_length = tl.load(LENGTH + part, mask=real, other=0.0)
        its_centred = tl.load(CENTRED + part, mask=real, other=0.0)
        centred = r * (centred + length * (ref - raised)) + w * (its_centred + its_length * (its_ref - raised))
        length = r * length + w * its_length
        count += tl.load(COUNT + part, mask=real, other=0)
        if DISTANCE:
            distance = r * distance + w * tl.load(DISTANCES + part, mask=real, other=0.0)
        if SETS > 0:
            there = real[:, None] & (sets < SETS)[None, :]
            more = tl.load(MASS + part[:, None] * SETS + sets[None, :], mask=there, other=0.0)
            mass = mass * r[:, None] + more * w[:, None]
        if BINS > 0:
            there = real[:, None] & (bins < BINS)[None, :]
            more = tl.load(HISTOGRAM + part[:, None] * BINS + bins[None, :], mask=there, other=0.0)
            histogram = histogram * r[:, None] + more * w[:, None]
        ref = raised
    scaled = tl.zeros([BLOCK], tl.float32) + 1.0  # of the sums over keys, to the sink's reference
    sink = tl.zeros([BLOCK], tl.float32)
    keys = count
    if SINK:
        logit = tl.load(SINKS + at % H, mask=real, other=0.0) * (1.0 / LN2)
        raised = tl.maximum(ref, tl.ceil(logit))
        gap = logit - raised
        sink = tl.exp2(gap)
        scaled = tl.exp2(ref - raised)
        centred = scaled * (centred + length * (ref - raised)) + sink * gap
        length = scaled * length + sink
        ref = raised
        keys += (logit > NO_SINK).to(tl.int32)
    safe = tl.maximum(length, 1e-37)
    share = scaled / safe
    entropy = (tl.log2(safe) - centred / safe) * LN2
    tl.store(LSE + at, tl.where(length > 0, (ref + tl.log2(safe)) * LN2, float("-inf")), mask=real)
    tl.store(ENTROPY + at, tl.where(keys > 1, tl.maximum(entropy, 0.0), 0.0), mask=real)
    tl.store(VISIBLE + at, count.to(tl.int64), mask=real)
    first = tl.exp2(tl.fma(top, tl.full([BLOCK], c, tl.float32), -ref)) / safe
    tl.store(TOP1_PROB + at, tl.where(count > 0, first, 0.0), mask=real)
    tl.store(SINK_MASS + at, sink / safe, mask=real)
    if TOP1 > 0:
        tl.store(TOP1_KEY + at, index.to(tl.int64), mask=real)
    if DISTANCE:
        tl.store(DISTANCE_OUT + at, distance * share, mask=real)
    if SETS > 0:
        there = real[:, None] & (sets < SETS)[None, :]
        tl.store(MASS_OUT + at[:, None] * SETS + sets[None, :], mass * share[:, None], mask=there)
    if BINS > 0:
        there = real[:, None] & (bins < BINS)[None, :]
        tl.store(HISTOGRAM_OUT + at[:, None] * BINS + bins[None, :], histogram * share[:, None], mask=there)
