"""cap(), ablate(), edit() and knockout(): run-time changes to what sites see and say; each restores on exit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .config import whole_number
from .kernels.windowed import check_cap
from .sites import Site, switched

Edit = Callable[[Tensor, Tensor | None], Tensor]
FAR = 2**30  # longer than any context; caps and sinks are cut to it, since kernels count in int32


@contextlib.contextmanager
def cap(model: Any, layers: Any, *, sinks: Any, kinds: Mapping[str, Any]) -> Iterator[None]:
    """See `Instrumented.cap`."""
    named = _named_sites(model, layers, kinds)
    first = whole_number(sinks)
    if first is None or first < 0:
        raise ValueError(f"sinks={sinks!r}: expected a whole number >= 0")
    limits = {site: check_site_cap(site, limit) for site, limit in named.items()}
    for site in named:
        if first and not site.softmax:
            raise ValueError(
                f"sinks={first}: {site.name} is {site.kind} ({site.mixer}) and has no keys to keep; "
                "cap it without sinks, nested if need be"
            )
    changes = [(site, "cap", limit) for site, limit in limits.items()]
    changes += [(site, "sinks", min(first, FAR)) for site in named]
    with switched(model, changes):
        yield


def check_site_cap(site: Site, limit: Any) -> int | None:
    """The cap as the site holds it; ValueError when `limit` is not one that it can take."""
    if limit is None:
        return None
    number = whole_number(limit)
    if number is None or number < 1:
        raise ValueError(f"cap of {site.name}: {limit!r}; expected a whole number >= 1 (the query counts) or None")
    refuse_opaque(site, "cap")
    try:
        check_cap(number, site.conv)
    except ValueError as error:
        raise ValueError(f"{site.name}: {error}") from None
    return min(number, FAR)


def refuse_opaque(site: Site, what: str) -> None:
    """ValueError for a mixer whose inside the loader does not reach."""
    if site.opaque:
        raise ValueError(
            f"{what}: {site.name} is {site.kind} ({site.mixer}), whose inside is not reached (docs/families.md)"
        )


def _named_sites(model: Any, layers: Any, kinds: Mapping[str, Any]) -> dict[Site, Any]:
    if not isinstance(layers, Mapping | None):
        raise ValueError(f"cap: layers={layers!r}: expected layers or (layer, site) with their caps, {{3: 128}}")
    if not layers and not kinds:
        raise ValueError("cap: name a kind (full=..., window=..., recurrent=...) or layers ({3: 128})")
    named: dict[Site, Any] = {}
    present = sorted({s.kind for s in model.sites})
    for kind, limit in kinds.items():
        if kind not in present:
            raise ValueError(f"cap: this model has no {kind!r} sites; it has: {', '.join(present)}")
        named.update({s: limit for s in model.sites if s.kind == kind})
    for key, limit in (layers or {}).items():
        place = key if isinstance(key, tuple) else (key,)
        if isinstance(key, tuple) and len(key) != 2:
            raise ValueError(f"cap: layers has the key {key!r}; expected a layer or (layer, site)")
        named.update(dict.fromkeys(model.sites.select(*place), limit))
    return named


@contextlib.contextmanager
def ablate(model: Any, heads: Sequence[tuple[int, ...]], how: str, reference: Tensor | None) -> Iterator[None]:
    """See `Instrumented.ablate`."""
    if how not in ("zero", "mean"):
        raise ValueError(f'how={how!r}: expected "zero" or "mean"')
    if reference is not None and how != "mean":
        raise ValueError('reference: only how="mean" takes reference tokens')
    if isinstance(heads, tuple) and heads and isinstance(heads[0], int):
        raise ValueError(f"heads={heads!r}: expected a list of (layer, head) or (layer, site, head)")
    chosen: dict[Site, list[int]] = {}
    for head in heads:
        site, number = model.sites.head(head)
        refuse_opaque(site, "ablate")
        chosen.setdefault(site, []).append(number)
    means = _head_means(model, list(chosen), reference) if reference is not None else {}
    changes = []
    for site, numbers in chosen.items():
        values = {n: 0.0 if how == "zero" else means[site][n] if site in means else None for n in numbers}
        changes.append((site, "edit", _replacement(values, site.edit)))
    with switched(model, changes):
        yield


@contextlib.contextmanager
def edit(model: Any, edits: Mapping[Site, Edit]) -> Iterator[None]:
    """See `Instrumented.edit`."""
    for site in edits:
        refuse_opaque(site, "edit")
    with switched(model, [(site, "edit", _after(site.edit, new)) for site, new in edits.items()]):
        yield


def _after(outer: Edit | None, new: Edit) -> Edit:
    return new if outer is None else lambda z, real: new(outer(z, real), real)


def _replacement(values: Mapping[int, Tensor | float | None], outer: Edit | None) -> Edit:
    """An edit of head outputs z [B,T,H,V]: a head in `values` becomes its value, or (None) its mean here."""

    def edit(z: Tensor, real: Tensor | None) -> Tensor:
        z = z.clone() if outer is None else outer(z, real).clone()
        for head, value in values.items():
            out = z[:, :, head]
            if value is None:
                value = (out.flatten(0, 1) if real is None else out[real]).mean(0)
            z[:, :, head] = value
        return z

    return edit


@torch.no_grad()
def _head_means(model: Any, sites: list[Site], reference: Tensor) -> dict[Site, Tensor]:
    """Mean output of each head over reference tokens [B,T]: [H,V] per site. Nobody records this pass."""
    means: dict[Site, Tensor] = {}

    def meter(site: Site) -> Edit:
        def edit(z: Tensor, real: Tensor | None) -> Tensor:
            means[site] = z.mean((0, 1))
            return z

        return edit

    changes: list[tuple[Any, str, Any]] = [(site, "edit", meter(site)) for site in sites]
    changes += [(model, "recorders", ()), *[(site, "tap", None) for site in model.sites]]
    with switched(model, changes):
        model.hidden(reference)
    return means


@contextlib.contextmanager
def knockout(model: Any, rows: Any, keys: Any, layers: Any, heads: Any) -> Iterator[None]:
    """See `Instrumented.knockout`."""
    if layers is not None and heads is not None:
        raise ValueError("knockout: give layers or heads, not both")
    rows_, mask = _row_columns(rows), _key_mask(keys)
    targets: dict[Site, list[int] | None] = {}
    if heads is not None:
        for head in _listed("heads", heads):
            site, number = model.sites.head(head)
            numbers = targets.setdefault(site, [])
            assert numbers is not None
            numbers.append(number)
    elif layers is not None:
        for layer in _listed("layers", layers):
            here = model.sites.select(layer)
            targets.update(dict.fromkeys([s for s in here if s.softmax] or here))
    else:
        targets = {s: None for s in model.sites if s.softmax}
        if not targets:
            present = ", ".join(sorted({s.kind for s in model.sites}))
            raise ValueError(f"knockout: this model has no softmax sites to cut edges from; it has: {present}")
    for site in targets:
        if not site.softmax:
            raise ValueError(
                f"knockout: {site.name} is {site.kind} ({site.mixer}) and has no softmax to cut edges from"
            )
    with switched(model, [(s, "knockout", (*s.knockout, (rows_, mask, n))) for s, n in targets.items()]):
        yield


def _listed(name: str, given: Any) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise ValueError(f"knockout: {name}={given!r}: expected a list; None means all") from None


def _tensor(given: Any) -> Tensor | None:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):  # None, text, lists of several lengths
        return None


def _are_columns(x: Tensor) -> bool:
    whole = x.dtype != torch.bool and not x.is_floating_point() and not x.is_complex()
    return whole and x.numel() > 0 and int(x.min()) >= 0


def _row_columns(rows: Any) -> Tensor:
    """Query columns [1 or B, R]."""
    r = _tensor(rows)
    if r is None or r.ndim not in (1, 2) or (r.numel() and not _are_columns(r)):
        raise ValueError(f"rows: expected token columns >= 0, as a list or [B,R]; got {rows!r:.80}")
    return r.long() if r.ndim == 2 else r.long()[None]


def _key_mask(keys: Any) -> Tensor:
    """Key columns as a bool mask [1 or B, N]."""
    k = _tensor(keys)
    if k is not None and not k.numel():
        return torch.zeros(1, 1, dtype=torch.bool)
    if k is not None and k.dtype == torch.bool and k.ndim in (1, 2):
        return k if k.ndim == 2 else k[None]
    if k is None or k.ndim != 1 or not _are_columns(k):
        raise ValueError(f"keys: expected a list of token columns >= 0, or a bool mask [T] or [B,T]; got {keys!r:.80}")
    mask = torch.zeros(1, int(k.max()) + 1, dtype=torch.bool)
    mask[0, k.long()] = True
    return mask
