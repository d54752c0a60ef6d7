"""Launches the kernels of attention_stats_triton: tiles, splits over the keys, positions and labels as they want them.

Importing this needs Triton. Tiles come from a table, not from autotuning, so equal calls run equal code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from . import attention_stats_triton as kernels
from .attention_stats_join import NO_SINK, join_kernel
from .attention_stats_triton import LN2, PADDING

STATS: Any = kernels.stats_kernel
JOIN: Any = join_kernel
INTERPRETED = not isinstance(STATS, triton.JITFunction)
FAR = 2**30  # a window that binds nowhere, and whose sum with a position is an int32
SCALES = (1e-6, 1e6)  # others are multiplied into the queries


class Tile(NamedTuple):
    """What one program works on: BLOCK_M (row, head) pairs by BLOCK_N keys."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None
    """At most so many a thread, for two programs on a multiprocessor; checked not to spill."""
    find: int = 1
    """Where the top key is asked for, 1: it travels with the maximum; 2: it is looked for where a block raises one."""


TILES = {  # by widest head dim, for 16-bit and for fp32 inputs (whose products have no tensor cores)
    16: {64: Tile(64, 128, 4, 3, 168), 128: Tile(128, 128, 8, 2, 128), 256: Tile(128, 64, 8, 2, 128)},
    32: {128: Tile(64, 32, 8, 2), 256: Tile(32, 16, 4, 1)},
}
TOP1 = {16: {128: Tile(64, 128, 4, 3, find=2)}}  # where the top key is asked for
SMALL = {  # where a group has few pairs of rows and heads
    16: {16: Tile(16, 64, 4, 3), 64: Tile(64, 64, 4, 3)},
    32: {16: Tile(16, 32, 4, 1)},
}


def tile_for(head_dim: int, bits: int, pairs: int, *, top1: bool = False) -> Tile:
    """The tile for so many (row, head) pairs of a group. ValueError past a head dim of 256."""
    if head_dim > 256:
        raise ValueError(f"attention_stats: head dim {head_dim}; the kernel goes up to 256, the torch path further")
    for most, tile in SMALL[bits].items():
        if pairs <= most:
            return tile
    by_width = (TOP1.get(bits, {}) if top1 else {}), TILES[bits]
    return next(tile for tiles in by_width for widest, tile in tiles.items() if head_dim <= widest)


def widths(head_dim: int) -> tuple[int, int]:
    """Head dim as two tiles, so that 80, 96 or 192 are not padded to the next power of two."""
    first = max(16, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - first
    return first, 0 if rest <= 0 else max(16, _power_of_2(rest))


def _power_of_2(n: int) -> int:
    """The next one from n on."""
    return 1 << (n - 1).bit_length()


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def splits_for(tiles: int, blocks: int, device: torch.device) -> int:
    """In how many parts of the keys a launch of few tiles is cut, to keep the device busy: a power of two."""
    if device.type != "cuda":
        return 1
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    parts = 1
    while parts < 64 and 2 * parts * tiles <= 2 * programs and 8 * parts <= blocks:
        parts *= 2
    return parts


def stats(
    *, q: Tensor, k: Tensor, rows: Tensor | None, scale: float, causal: bool, window: int | None, sinks: int,
    limit: int | None, sink_logits: Tensor | None, softcap: float | None, labels: Tensor | None, sets: int,
    q_pos: Tensor | None, k_pos: Tensor | None, q_seg: Tensor | None, k_seg: Tensor | None, top1: bool,
    distance: bool, bins: int, tile: Tile | None = None, splits: int | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Fields of AttentionStats for q [B,T,H,K], k [B,S,G,K] and the other arguments of attention_stats(), checked.

    `rows` [1 or B,R] int64; `labels` uint8 [B,S] with `sets` bits in use; what was not asked for has a last dimension
    of 0. `tile` and `splits` override the table. Raises ValueError without a CUDA device, but under TRITON_INTERPRET=1.
    """
    if not (q.is_cuda or INTERPRETED):
        raise ValueError(f'impl="triton": the tensors are on {q.device}; expected CUDA (or TRITON_INTERPRET=1)')
    if q.dtype != k.dtype:
        wide = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(wide), k.to(wide)
    if not SCALES[0] <= scale <= SCALES[1]:  # zero, negative, or out of the range of the finite stand-ins
        q, k, scale = q.float() * scale, k.float(), 1.0
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    B, T, H, D = q.shape
    S, G = k.shape[1:3]
    R = T if rows is None else rows.shape[1]
    out = _outputs(q, B, R, H, top1, distance, sets, bins)
    if not out["lse"].numel():
        return out
    tile = tile or tile_for(D, 8 * q.element_size(), R * (H // G), top1=top1)
    d1, d2 = widths(D)
    near = min(x for x in (window, limit, FAR) if x is not None)
    blocks, tiles = _blocks(S, tile.n), _blocks(R * (H // G), tile.m)
    parts = splits or splits_for(tiles * B * G, min(blocks, _blocks(near + R, tile.n)), q.device)
    where = _positions(B, T, S, tile.n, q_pos, k_pos, q_seg, k_seg, q)
    marked = q
    if sets:
        assert labels is not None
        labels = labels.contiguous()
        marked = F.pad(labels, (0, blocks * tile.n - S)).view(B, blocks, tile.n).amax(-1)
    chosen = None if rows is None else rows.contiguous()
    sums = _sums(q, parts, out)
    c = (scale if softcap is None else softcap) / LN2.value
    flags: dict[str, Any] = {
        "SPLITS": parts, "TOP1": tile.find if top1 else 0, "DISTANCE": distance, "SETS": sets, "BINS": bins,
        "SETS2": _power_of_2(max(1, sets)), "BINS2": _power_of_2(max(1, bins)),
    }  # fmt: skip
    with torch.cuda.device(q.device if q.is_cuda else -1):
        STATS[(tiles * B * G * parts,)](
            q, k, q if chosen is None else chosen, *where["tensors"], q if labels is None else labels, marked, *sums,
            S, R, G, B, tiles, blocks, *q.stride()[:3], *k.stride()[:3],
            0 if chosen is None or chosen.shape[0] == 1 else R, where["s_q"], where["s_k"], S,
            c, 1.0 if softcap is None else scale / softcap, near, sinks, FAR if limit is None else min(limit, FAR),
            GROUP=H // G, D=D, D1=d1, D2=d2, BLOCK_M=tile.m, BLOCK_N=tile.n, CAUSAL=causal, CHOSEN=chosen is not None,
            BAND=near < FAR, POSITIONS=where["given"], SEGMENTS=where["segments"], SOFTCAP=softcap is not None,
            UPCAST=INTERPRETED, **flags, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        n, block = B * R * H, 128
        JOIN[(_blocks(n, block),)](
            *sums, q if sink_logits is None else sink_logits.float().clamp(min=NO_SINK.value),
            *(out[name] for name in _ORDER), n, H, c, BLOCK=block, SINK=sink_logits is not None, **flags, num_warps=4,
        )  # fmt: skip
    return out


_ORDER = ("lse", "entropy", "visible", "top1", "top1_prob", "distance", "sink_mass", "mass", "histogram")


def _outputs(q: Tensor, B: int, R: int, H: int, top1: bool, distance: bool, sets: int, bins: int) -> dict[str, Tensor]:
    out = {name: q.new_empty(B, R, H, dtype=torch.float32) for name in ("lse", "entropy", "top1_prob", "sink_mass")}
    out["visible"] = q.new_empty(B, R, H, dtype=torch.int64)
    out["top1"] = q.new_empty(B, R, H if top1 else 0, dtype=torch.int64)
    out["distance"] = q.new_empty(B, R, H if distance else 0, dtype=torch.float32)
    out["mass"] = q.new_empty(B, R, H, sets, dtype=torch.float32)
    out["histogram"] = q.new_empty(B, R, H, bins, dtype=torch.float32)
    return out


def _sums(q: Tensor, parts: int, out: dict[str, Tensor]) -> list[Tensor]:
    """Buffers of the running sums, [parts,B,R,H(,n)]: top, l, a, visible keys, top key, distance, mass, histogram."""
    kinds = [("lse", torch.float32)] * 3 + [("visible", torch.int32), ("top1", torch.int32)]
    kinds += [(name, torch.float32) for name in ("distance", "mass", "histogram")]
    return [q.new_empty(parts, *out[name].shape, dtype=dtype) for name, dtype in kinds]


def _positions(
    B: int, T: int, S: int, block: int, q_pos: Tensor | None, k_pos: Tensor | None, q_seg: Tensor | None,
    k_seg: Tensor | None, spare: Tensor,
) -> dict[str, Any]:  # fmt: skip
    """Positions and segments as int32 [B,T], [B,S], and the lowest and highest of each block of keys [B,blocks]."""
    segments = q_seg is not None and k_seg is not None
    if q_pos is None and not segments:
        return {"tensors": [spare] * 8, "s_q": 0, "s_k": 0, "given": False, "segments": False}

    def whole(x: Tensor | None, n: int) -> Tensor:
        x = torch.arange(n, device=spare.device)[None] if x is None else x
        return x.to(torch.int32).expand(B, n).contiguous()

    def ends(x: Tensor) -> list[Tensor]:
        repeated = torch.cat([x, x[:, -1:].expand(B, -S % block)], 1).view(B, -1, block)
        return [repeated.amin(-1), repeated.amax(-1)]

    queries = whole(q_pos, T).clamp(min=-1)  # padding; further below, distances to PADDING would not be int32
    keys = whole(k_pos, S)
    keys = torch.where(keys < 0, PADDING.value, keys)
    low, high = ends(keys)
    if S % block:
        high[:, -1] = PADDING.value  # a block that is not full is never taken without a mask
    segs = [whole(q_seg, T), whole(k_seg, S)] if segments else [spare, spare]
    seg_ends = ends(segs[1]) if segments else [spare, spare]
    tensors = [queries, keys, *segs, low, high, *seg_ends]
    return {"tensors": tensors, "s_q": T, "s_k": S, "given": True, "segments": segments}
