"""What decoding under caps of recurrent sites keeps, on the transformers cache of the context, and moved with its rows;
and the refusal of another cap in the middle of a context.

Beam search reorders the rows of a cache at every token. From the first ring on, the cache's own method for that
reorders its rings too. (transformers' methods that select or repeat rows do not move states of its own.)
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..kernels.windowed import Ring
from ..sites import Site

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # of forward's argument, newest first
RINGS = "hybridscope_rings"  # attribute of a cache: (cap, Ring) by the name of the site
STUCK = "hybridscope_stuck"  # attribute of a cache: a site whose mixer keeps a part of its state outside of it


def rings_of(cache: Any) -> dict[str, tuple[int | None, Ring]]:
    """The rings on a cache; none without one."""
    return {} if cache is None else cache.__dict__.setdefault(RINGS, {})


def seen(cache: Any) -> int:
    """How many tokens a transformers cache has seen. Some ask their first layer, which may hold a state instead; a
    cache of states alone does not know (0)."""
    lengths = [0]
    for layer in [(), *[(n,) for n in range(len(getattr(cache, "layers", ())))]]:
        with contextlib.suppress(ValueError):
            lengths.append(int(cache.get_seq_length(*layer)))
    return max(lengths)


def begun(cache: Any) -> bool:
    """Whether a transformers cache holds a context, be it of states alone."""
    with contextlib.suppress(AttributeError, ValueError):  # no states in it
        if cache.has_previous_state():
            return True
    return hasattr(cache, "get_seq_length") and seen(cache) > 0


def check_caps(cache: Any, sites: Iterable[Site]) -> None:
    """ValueError where a recurrent site's cap is not the one that the context on its cache was begun under."""
    for site in sites:
        cap, _ = rings_of(cache).get(site.name, (None, None))
        if site.kind == "recurrent" and cap != site.cap:
            raise ValueError(
                f"{site.name}: the cap of a recurrent site cannot change in the middle of a context "
                f"(cache made with cap={cap}, now {site.cap}); start a new cache"
            )


@contextlib.contextmanager
def checked(whole: Sequence[nn.Module], sites: Iterable[Site]) -> Iterator[None]:
    """`check_caps` before each forward pass of the modules that run all of these sites: ahead of any layer, so that
    the refusal leaves the cache as it was."""

    def enters(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = cache_in(given_to(module, args, kwargs)) if module in whole else None  # (else: a copy made meanwhile)
        if cache is not None and begun(cache):
            check_caps(cache, sites)

    handles = [module.register_forward_pre_hook(enters, with_kwargs=True) for module in whole]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def given_to(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, by name."""
    return {**dict(zip(inspect.signature(type(module).forward).parameters, (module, *args), strict=False)), **kwargs}


def cache_in(given: dict[str, Any]) -> Any:
    """The cache among a forward's arguments."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


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
