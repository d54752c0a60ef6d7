"""What decoding under caps of recurrent sites keeps, on the transformers cache of the context, and moved with its rows.

Beam search reorders the rows of a cache at every token. From the first ring on, the cache's own method for that
reorders its rings too. (transformers' methods that select or repeat rows do not move states of its own.)
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn

from ..kernels.windowed import Ring

RINGS = "hybridscope_rings"  # attribute of a cache: (cap, Ring) by the name of the site
STUCK = "hybridscope_stuck"  # attribute of a cache: a site whose mixer keeps a part of its state outside of it


def rings_of(cache: Any) -> dict[str, tuple[int | None, Ring]]:
    """The rings on a cache; none without one."""
    return {} if cache is None else cache.__dict__.setdefault(RINGS, {})


def keep(cache: Any, name: str, cap: int, ring: Ring, mixer: nn.Module) -> None:
    """Put the ring of site `name` on its cache."""
    rings_of(cache)[name] = (cap, ring)
    if any(isinstance(x, Tensor) for module in mixer.modules() for x in vars(module).values()):
        cache.__dict__[STUCK] = name
    if hasattr(type(cache), "reorder_cache"):  # a bound method, not a closure: copies of the cache get their own
        cache.__dict__["reorder_cache"] = types.MethodType(_reorder, cache)


def _reorder(cache: Any, beams: Tensor) -> None:
    """In the place of the cache's `reorder_cache`."""
    stuck = cache.__dict__.get(STUCK)
    if stuck in rings_of(cache):
        raise ValueError(
            f"reorder_cache: {stuck} keeps a part of its state outside of the cache, where transformers does not move "
            "it with the beams; pass use_cache=False"
        )
    type(cache).reorder_cache(cache, beams)
    for _, ring in rings_of(cache).values():
        rows = beams.to(ring.keys.device)
        ring.keys, ring.values, ring.seen = (x.index_select(0, rows) for x in (ring.keys, ring.values, ring.seen))
