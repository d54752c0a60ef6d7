"""What a transformers model is made of, found by running three tokens through it and watching.

Sites are the modules that call the attention interface, with the heads and windows that the call shows; RoPE
is there if queries turn when positions shift and the layer's input does not. Recurrent mixers are those of
`recurrent_sites.py`. A layer with neither that still mixes tokens is a site that nothing reaches. The point between
mixer and MLP is where the running values say it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..sites import Site, Sites
from .interface import SITE, Attachment, listening, site_of
from .recurrences import framed, standing_in
from .recurrent_sites import Seen, recurrent_mixers, recurrent_site, watching_outputs

TOKENS, SHIFT = 3, 16  # length of the trial run; how far its second pass moves positions


@dataclasses.dataclass
class Mid:
    """Where the residual stream between mixer and MLP shows: at the `input` of module `path`, or as the
    layer's input plus `scale` times its `output`."""

    path: str
    end: str
    scale: float = 1.0


@dataclasses.dataclass
class Layer:
    """One decoder layer: its module path, the place of its middle (None: not found), and whether its sites run one
    after the other."""

    path: str
    mid: Mid | None = None
    chained: bool = False


@dataclasses.dataclass
class Survey:
    """Module paths of the backbone (embedding to final norm) and the layers, the sites, and what the backbone
    and the head made of the trial tokens."""

    backbone: str
    layers: list[Layer]
    sites: Sites
    hidden: Tensor
    logits: Tensor


@dataclasses.dataclass
class _Trial:
    calls: list[_Call]
    events: list[list[_Event]]
    hidden: Tensor
    logits: Tensor


@dataclasses.dataclass
class _Event:
    path: str
    start: int
    stop: int
    given: Tensor | None
    made: Tensor | None


@dataclasses.dataclass
class _Call:
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    window: int | None


def survey(model: Any) -> Survey:
    """Find backbone, layers and sites; marks the modules that attend with their Site. ValueError where there
    is no decoder to be found."""
    names = {id(module): name for name, module in model.named_modules()}
    stack = _layer_stack(model)
    backbone = _backbone(model, stack)
    layers = [Layer(names[id(module)]) for module in stack]
    trial = _trial(model, backbone, stack, shift=0)
    calls, events = trial.calls, trial.events
    streams = [_input(seen) for seen in events]
    attending = {id(call.module) for call in calls}
    mixers = [recurrent_mixers(module, layer.path, attending) for layer, module in zip(layers, stack, strict=True)]
    seen = Seen()
    every = [mixer for found in mixers for _, mixer in found]
    with standing_in(every), framed(every, seen.note), watching_outputs(every, seen):
        moved = _trial(model, backbone, stack, shift=SHIFT, streams=streams)
    sites: list[Site] = []
    for number, layer in enumerate(layers):
        prefix = layer.path + "."
        found: list[Site] = []
        for call, again in zip(calls, moved.calls, strict=True):
            name = names[id(call.module)]
            if not name.startswith(prefix) or any(site.name == name for site in found):
                continue
            turned = (again.query.double() - call.query.double()).norm() / call.query.double().norm()
            known: dict[str, Any] = {"layer": number, "name": name, "rope": float(turned) > 0.02}
            source = call.window if call.mask is None else call.mask
            site = site_of(source, call.query, call.key, call.value, **known, conv=_span(call.module))
            found.append(_marked(call.module, site))
        found += [recurrent_site(mixer, number, name, seen) for name, mixer in mixers[number]]
        for index, site in enumerate(found):
            site.index = index
        inside = [site.name.removeprefix(prefix) for site in found]
        layer.mid = _middle(events[number], set(inside))
        layer.chained = _chained(events[number], inside)
        sites += found
    silent = [number for number in range(len(stack)) if not any(site.layer == number for site in sites)]
    if silent:
        sites += _unknown(model, backbone, stack, layers, streams, events, silent)
        sites.sort(key=lambda site: site.layer)
    Attachment.of(model).mixers = None  # look for marks again
    return Survey(names[id(backbone)], layers, Sites(sites), trial.hidden, trial.logits)


def _span(module: nn.Module) -> int:
    """How many tokens the convolutions inside an attention module make of one key or query: 1 without any."""
    return 1 + sum(m.kernel_size[0] - 1 for m in module.modules() if isinstance(m, nn.Conv1d))


def _unknown(
    model: Any, backbone: nn.Module, stack: nn.ModuleList, layers: list[Layer], streams: Sequence[Tensor | None],
    events: list[list[_Event]], silent: list[int],
) -> list[Site]:  # fmt: skip
    """Sites for layers without any that mix tokens all the same: their last output moves with their first input."""
    pushed = [None if x is None else x + x.new_tensor([1.0, *[0.0] * (TOKENS - 1)])[:, None] for x in streams]
    again = _trial(model, backbone, stack, shift=0, streams=pushed).events
    sites = []
    for number in silent:
        before, after = events[number][-1].made, again[number][-1].made
        if before is None or after is None or torch.equal(before[:, -1], after[:, -1]):
            continue  # an MLP on its own
        kind = type(stack[number]).__name__
        warnings.warn(
            f"layer {number} ({kind}) mixes tokens in a way that is not known here: its residual stream is recorded, "
            "but caps, ablations and statistics cannot reach it", stacklevel=2,
        )  # fmt: skip
        where: dict[str, Any] = {"layer": number, "name": layers[number].path, "kind": "unknown", "mixer": "unknown"}
        sites.append(Site(**where, heads=1, kv_heads=1, key_dim=1, value_dim=1, opaque=True))
    return sites


def _layer_stack(model: Any) -> nn.ModuleList:
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not stacks:
        raise ValueError(f"{type(model).__name__}: has no list of layers")
    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    fitting = [stack for stack in stacks if len(stack) == depth] or stacks
    return max(fitting, key=lambda stack: sum(p.numel() for p in stack.parameters()))


def _backbone(model: Any, stack: nn.ModuleList) -> nn.Module:
    """The innermost module that holds both the embedding and the layers: what is around it is the head."""
    embedding = model.get_input_embeddings()
    holders = [
        module for module in model.modules()
        if module is not model and {id(embedding), id(stack)} <= {id(m) for m in module.modules()}
    ]  # fmt: skip
    if not holders:
        raise ValueError(f"{type(model).__name__}: has no decoder under a language-model head")
    return min(holders, key=lambda module: sum(1 for _ in module.modules()))


def _marked(module: nn.Module, site: Site) -> Site:
    """The Site that the module carries from an earlier load, if it says the same; else `site`, put on it."""
    old = module.__dict__.get(SITE)
    if old is not None and all(
        getattr(old, f.name) == getattr(site, f.name) for f in dataclasses.fields(Site) if f.repr
    ):
        return old
    module.__dict__[SITE] = site
    return site


# The trial run


@torch.no_grad()
def _trial(
    model: Any,
    backbone: nn.Module,
    stack: nn.ModuleList,
    *,
    shift: int,
    streams: Sequence[Tensor | None] = (),
) -> _Trial:
    """Attention calls, and the events inside each layer, its own last. `streams` replace the layers'
    inputs."""
    embedding = model.get_input_embeddings()
    device = embedding.weight.device
    if device.type == "meta" and (runs_on := getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)):
        device = torch.device(runs_on)  # offloaded; accelerate brings it there
    if device.type == "meta":
        raise ValueError(f"{type(model).__name__}: its weights are on the meta device; load them first")
    vocab = embedding.weight.shape[0]
    tokens = (vocab // 3 + torch.arange(TOKENS, device=device)[None]) % vocab
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    accepted = inspect.signature(type(backbone).forward).parameters
    if "position_ids" in accepted:
        inputs["position_ids"] = shift + torch.arange(TOKENS, device=device)[None]
    calls: list[_Call] = []
    events: list[list[_Event]] = [[] for _ in stack]

    def heard(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, window: int | None) -> None:
        calls.append(_Call(module, q, k, v, mask, window))

    with _evaluating(model), _watching(stack, events), Attachment.of(model).on(), standing_in(stack), listening(heard):
        seen: list[Any] = []
        handles = [backbone.register_forward_hook(lambda _m, _args, out: seen.append(out))]
        for module, stream in zip(stack, streams, strict=False):
            handles.append(module.register_forward_pre_hook(_replacing(stream), with_kwargs=True))
        try:
            logits = model(**inputs).logits
        except (AttributeError, TypeError) as error:
            if "Mask" not in str(error):
                raise
            name = type(model).__name__
            raise ValueError(f"{name}: its attention bypasses transformers' AttentionInterface ({error})") from error
        finally:
            for handle in handles:
                handle.remove()
    return _Trial(calls, events, seen[0].last_hidden_state, logits)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and with each module's mode restored afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _watching(stack: nn.ModuleList, events: list[list[_Event]]) -> Iterator[None]:
    """Note what goes into and comes out of each layer and of the modules up to two levels inside it."""
    handles: list[Any] = []
    clock = iter(range(10**9))
    for layer, module in enumerate(stack):
        inner = [(path, m) for path, m in module.named_modules() if path.count(".") < 2]
        for path, m in inner:
            opened: list[tuple[int, Tensor | None]] = []

            def before(_m: Any, args: Any, kwargs: Any, opened: list[Any] = opened) -> None:
                opened.append((next(clock), first_tensor(args, kwargs)))

            def after(
                _m: Any,
                _args: Any,
                out: Any,
                opened: list[Any] = opened,
                path: str = path,
                layer: int = layer,
            ) -> None:
                start, given = opened.pop()
                events[layer].append(_Event(path, start, next(clock), given, first_tensor(out)))

            handles.append(m.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(m.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(args: Any, kwargs: Any = None) -> Tensor | None:
    """The hidden states among a module's arguments, or in its output."""
    if isinstance(args, Tensor):
        return args
    if isinstance(args, tuple | list) and args:
        return args[0] if isinstance(args[0], Tensor) else None
    if kwargs:
        given = kwargs.get("hidden_states", next(iter(kwargs.values())))
        return given if isinstance(given, Tensor) else None
    return None


def _replacing(stream: Tensor | None) -> Callable[..., Any]:
    """A pre-hook that puts `stream` in the place of a layer's hidden states."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if stream is None:
            return None
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})

    return hook


# The middle of a layer


def _middle(events: list[_Event], mixers: set[str]) -> Mid | None:
    """Find the residual stream after the mixer, from what the modules of one layer saw.

    It is the first tensor X given to a module after the mixer that is the layer's input plus something the
    mixer (or a norm behind it) made, or the layer's output minus something a later module made. Where there
    is none, the mixer runs beside the MLP: then what the mixer side adds is told from the layer's output.
    """
    if not events or events[-1].path:
        return None
    *inner, whole = events
    pre, post = whole.given, whole.made
    stops = [e.stop for e in inner if e.path in mixers]
    if pre is None or post is None or pre.shape != post.shape or pre.ndim != 3 or not stops:
        return None
    mixed = max(stops)
    later = [e for e in inner if e.start > mixed]
    made = [e for e in inner if e.stop >= mixed and _like(e.made, pre) is not None]
    for event in sorted(later, key=lambda e: e.start):
        X = _like(event.given, pre)
        if X is None or torch.equal(X, pre):
            continue
        sources = [e.made for e in made if e.stop <= event.start]
        sinks = [e.made for e in later if e.stop > event.start and _like(e.made, pre) is not None]
        if any(_explains(X, pre, [y]) for y in sources) or any(_explains(post, X, [y]) for y in sinks):
            return Mid(event.path, "input")
    for source in made:
        others = [[e.made] for e in inner if e is not source and _like(e.made, pre) is not None]
        for other in [[], *others]:
            scale = _explains(post, pre, [source.made, *other])
            if scale:
                return Mid(source.path, "output", 1.0 if abs(scale - 1) < 1e-2 else scale)
    return None


def _chained(events: list[_Event], mixers: list[str]) -> bool:
    """Whether the mixers of a layer read different things; side by side they read the same, up to a factor."""
    given = [e.given for path in mixers for e in events if e.path == path]
    return any(
        x is None or x.shape != given[0].shape or not _explains(x, torch.zeros_like(x), [given[0]])
        for x in given[1:]
        if given[0] is not None
    )


def _input(events: list[_Event]) -> Tensor | None:
    return events[-1].given if events else None


def _like(x: Tensor | None, stream: Tensor) -> Tensor | None:
    """`x` in the shape of the residual stream, where it is one with batch and time flattened or not."""
    if x is None or x.numel() != stream.numel() or x.shape[-1] != stream.shape[-1]:
        return None
    return x.reshape(stream.shape)


def _explains(total: Tensor, base: Tensor, parts: list[Any]) -> float:
    """The first part's weight if total = base + weighted parts up to rounding, each weight far from 0; else
    0."""
    eps = torch.finfo(total.dtype).eps
    x, y = base.double().flatten().cpu(), total.double().flatten().cpu()
    A = torch.stack([p.double().flatten().cpu() for p in parts], 1)
    if not bool(torch.isfinite(A).all()) or float(A.norm()) == 0:
        return 0.0
    weights = torch.linalg.lstsq(A, (y - x)[:, None], driver="gelsd").solution[:, 0]
    left = y - x - A @ weights
    close = float(left.norm()) <= 2 * eps * float(y.norm()) + 1e-4 * float((y - x).norm())
    return float(weights[0]) if close and float(weights.abs().min()) > 0.03 else 0.0
