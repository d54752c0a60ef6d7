"""Recurrent mixers of transformers models under caps, ablations and statistics.

While our attention is on (`interface.Attachment`), the ops that a mixer's forward looks up, in its module's globals or
on itself, are stood in for: a call is handed on as it is, unless the mixer's Site has a switch set, and then the same
recurrence runs here under it. Lightning attention calls no op; its products are read off the modules around them. Head
outputs are edited where they enter the output projection, as in our own mixers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import fused
from ..kernels.windowed import Ring, capped
from ..mixers.recurrent import ring_of, steps
from ..passes import Pass
from ..sites import Site
from .ops import Op, Read, arguments, op_of, wide
from .rings import cache_in, check_caps, given_to, keep, rings_of

MARK = "hybridscope_recurrence"  # attribute of a mixer that is reached

_local = threading.local()
_lock = threading.RLock()
_stand_ins: dict[tuple[int, str], int] = {}  # how many attachments need the stand-in at (owner, name)


@dataclasses.dataclass
class Reached:
    """On a mixer whose recurrence is reached: its Site, and the path of its output projection inside it."""

    site: Site
    output: str | None


@dataclasses.dataclass
class _Frame:
    """One running forward pass of a mixer. `note` is told of its op calls (by the survey)."""

    mixer: nn.Module
    site: Site | None
    real: Tensor | None
    cache: Any
    note: Callable[[nn.Module, Read], None] | None = None
    called: bool = False
    inputs: Tensor | None = None

    @property
    def rings(self) -> dict[str, tuple[int | None, Ring]]:
        return rings_of(self.cache)

    @property
    def wanted(self) -> bool:
        site = self.site
        if site is None or site.kind != "recurrent":  # a convolution's caps never bind
            return False
        return site.cap is not None or site.tap is not None or site.name in self.rings


# Standing in for ops


class _StandIn:
    """Called in the place of an op."""

    def __init__(self, function: Callable[..., Any], op: Op) -> None:
        functools.update_wrapper(self, function)
        self.function, self.op = function, op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame: _Frame | None = getattr(_local, "frame", None)
        if frame is None:
            return self.own(args, kwargs)
        frame.called = True
        if not frame.wanted and frame.note is None:
            return self.own(args, kwargs)
        read = self.op.read(arguments(self.function, args, kwargs))
        if frame.note is not None:
            frame.note(frame.mixer, read)
        own = functools.partial(self.own, args, kwargs)
        return _under_switches(frame, read, own) if frame.wanted else own()

    def own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The op itself. A kernel that transformers bound to it (fla's, where fla is installed) is for GPUs: on a CPU
        the plain function under it runs."""
        on_cpu = all(x.device.type == "cpu" for x in [*args, *kwargs.values()] if isinstance(x, Tensor))
        return (inspect.unwrap(self.function) if on_cpu else self.function)(*args, **kwargs)


def op_slots(mixer: nn.Module) -> list[tuple[dict[str, Any], str, Callable[..., Any], Op]]:
    """Where `mixer` (or a module in it) looks up ops: the dictionary, the name, the function."""
    found = []
    for module, forward in ((m, f) for m in mixer.modules() for f in _forwards(m)):
        own, shared = vars(module), forward.__globals__
        for name in forward.__code__.co_names:
            for owner in (own, shared):
                function = owner[name] if name in owner else getattr(type(module), name, None)
                if isinstance(function, _StandIn):
                    function = function.function
                op = op_of(function)
                if op is None or (owner is shared) != (name in shared):
                    continue
                if owner is own and name not in own:
                    function = getattr(module, name)  # a method of its class
                found.append((owner, name, function, op))
    return found


def _forwards(module: nn.Module) -> list[types.FunctionType]:
    """What may run as the module's forward: its class's, and the copy, with globals of its own, that nnsight puts in
    its place for good once `.source` was asked for."""
    forward = inspect.unwrap(type(module).forward)
    found = [forward] if isinstance(forward, types.FunctionType) else []
    ways = [getattr(getattr(vars(module).get("forward"), "state", None), "body", None)]
    while ways:
        way = ways.pop()
        if isinstance(way, types.FunctionType) and way not in found and way is not type(module).forward:
            found.append(way)
            ways += [cell.cell_contents for cell in way.__closure__ or () if cell != types.CellType()]  # decorators
    return found


@contextlib.contextmanager
def standing_in(mixers: Iterable[nn.Module]) -> Iterator[None]:
    """Stand in for the ops of these mixers for the length of a block; nests, over threads too."""
    slots = [slot for mixer in mixers for slot in op_slots(mixer)]
    taken: list[tuple[dict[str, Any], str]] = []
    with _lock:
        for owner, name, function, op in slots:
            key = (id(owner), name)
            if not _stand_ins.get(key):
                owner[name] = _StandIn(function, op)
            _stand_ins[key] = _stand_ins.get(key, 0) + 1
            taken.append((owner, name))
    try:
        yield
    finally:
        with _lock:
            for owner, name in taken:
                _stand_ins[id(owner), name] -= 1
                if _stand_ins[id(owner), name] == 0:
                    del _stand_ins[id(owner), name]
                    stand_in = owner[name]
                    if getattr(stand_in.function, "__self__", None) is not None:
                        del owner[name]  # the class's method shows again
                    else:
                        owner[name] = stand_in.function


# Frames


@contextlib.contextmanager
def framed(mixers: Iterable[nn.Module], note: Callable[[nn.Module, Read], None] | None = None) -> Iterator[None]:
    """Hooks that say which mixer is running, and edit its heads."""
    handles: list[Any] = []
    for mixer in mixers:
        handles += _hooks(mixer, note)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks(mixer: nn.Module, note: Callable[[nn.Module, Read], None] | None) -> list[Any]:
    outer: list[_Frame | None] = []
    reached: Reached | None = mixer.__dict__.get(MARK)
    site = None if reached is None else reached.site

    def enters(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if module is not mixer:  # a copy made while these hooks are on
            return
        given = given_to(module, args, kwargs)
        x = given.get("hidden_states")
        x = x if isinstance(x, Tensor) else next(v for v in given.values() if isinstance(v, Tensor))
        mask = given.get("attention_mask")
        real = None
        if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask[:, -x.shape[1] :].all()):
            real = mask[:, -x.shape[1] :].bool()
        outer.append(getattr(_local, "frame", None))
        _local.frame = _Frame(mixer, site, real, cache_in(given), note)

    def leaves(module: nn.Module, args: Any, out: Any) -> None:
        if module is not mixer or not outer:
            return
        frame: _Frame = _local.frame
        _local.frame = outer.pop()
        if out is not None and frame.wanted and not frame.called:
            raise ValueError(f"{site and site.name}: its op was bypassed, so caps and statistics cannot reach it")

    handles = [
        mixer.register_forward_pre_hook(enters, with_kwargs=True),
        mixer.register_forward_hook(leaves, always_call=True),
    ]
    if site is not None and reached is not None and reached.output is not None:
        handles.append(mixer.get_submodule(reached.output).register_forward_pre_hook(functools.partial(_edits, site)))
    if is_lightning(mixer):
        handles.append(mixer.get_submodule("qkv_proj").register_forward_hook(_lightning_inputs))
        handles.append(mixer.get_submodule("norm").register_forward_pre_hook(_lightning_outputs))
    return handles


def _edits(site: Site, _module: nn.Module, args: tuple[Any, ...]) -> Any:
    """At the output projection: the site's edit of head outputs."""
    frame: _Frame | None = getattr(_local, "frame", None)
    if site.edit is None or frame is None or frame.site is not site:
        return None
    x = args[0]
    z = x.unflatten(-1, (site.heads, -1))
    real = None if frame.real is None else frame.real.to(z.device)
    return (site.edit(z, real).to(x.dtype).flatten(-2), *args[1:])


# Lightning attention (arXiv 2401.04658, as in MiniMax): S_t = exp(-slope) S_{t-1} + k_t v_t^T, no op of its own


def is_lightning(mixer: nn.Module) -> bool:
    """Whether `mixer` is laid out as MiniMax's: one projection to q, k, v of every head, a slope per head, a norm
    over the heads' outputs."""
    buffers, children = dict(mixer.named_buffers(recurse=False)), dict(mixer.named_children())
    return "slope_rate" in buffers and {"qkv_proj", "norm"} <= children.keys() and hasattr(mixer, "act_fn")


def _lightning_inputs(_module: nn.Module, _args: Any, out: Tensor) -> None:
    frame: _Frame | None = getattr(_local, "frame", None)
    if frame is not None:
        frame.inputs = out


def _lightning_outputs(_module: nn.Module, args: tuple[Tensor, ...]) -> Any:
    frame: _Frame | None = getattr(_local, "frame", None)
    if frame is None or frame.inputs is None:
        return None
    frame.called = True
    if not frame.wanted and frame.note is None:
        return None
    mixer: Any = frame.mixer
    (x,) = wide(mixer.act_fn(frame.inputs))
    x = x if frame.real is None else x * frame.real[..., None].to(x.device)
    slope = mixer.slope_rate.flatten().to(x.dtype)
    q, k, v = x.unflatten(-1, (len(slope), -1)).chunk(3, -1)
    decay = (-slope).expand(*x.shape[:2], -1)[..., None]
    state = None if frame.cache is None else frame.cache.get_linear_cache(mixer.layer_idx)
    terms = {"q": q, "k": k, "v": v, "log_decay": decay}
    read = Read("lightning", terms, len(slope), state is None, lambda out: out.flatten(-2).to(args[0].dtype))
    if frame.note is not None:
        frame.note(mixer, read)
    return (_under_switches(frame, read, lambda: args[0]), *args[1:]) if frame.wanted else None


# The recurrence under the site's switches


def _under_switches(frame: _Frame, read: Read, own: Callable[[], Any]) -> Any:
    """What the op returns under the site's cap; `own` is the op itself. Tells the tap."""
    site = frame.site
    assert site is not None
    terms: dict[str, Any] = read.terms
    B, T = terms["v"].shape[:2]
    device = terms["v"].device  # the mixer's; hooks see a mask before it is moved there
    run = Pass(None if frame.real is None else frame.real.to(device), None, B, T, device)
    terms = {name: run.mute(run.compact(x)) for name, x in terms.items()}
    if site.tap is not None:
        write = {} if read.write is None else {"write": run.mute(run.compact(read.write))}
        site.tap(site, {**terms, **write}, run, "after")
    if not read.fresh:
        check_caps(frame.cache, [site])
    if site.cap is None:
        frame.rings.pop(site.name, None)  # an old context's, in a cache that starts again
        return own()
    if device.type == fused.DEVICE and read.dtype in (torch.bfloat16, torch.float16):  # what the op itself computes in
        terms |= {name: terms[name].to(read.dtype) for name in "qkv"}
    if not read.fresh:
        _, ring = frame.rings[site.name]
        return read.answer(run.restore(steps(ring, terms, run)))
    free = run.local < site.cap  # rows that the cap leaves alone are the op's own, to the last bit
    within = run.length <= site.cap or (run.real is not None and bool(free.all()))
    out = terms["v"] if within else capped(**terms, cap=site.cap, conv=site.conv)
    if frame.cache is not None:
        ring = ring_of(terms, run, site.cap, site.conv)
        keep(frame.cache, site.name, site.cap, ring, frame.mixer)
    return _joined(free, own(), read.answer(run.restore(out)), read.time)


def _joined(free: Tensor, own: Any, ours: Any, time: int) -> Any:
    """`ours`, with the rows `free` [1 or B,T] of the op's `own` output; not its state."""
    if isinstance(ours, tuple):
        return _joined(free, own[0], ours[0], time), *ours[1:]
    free = free.view(len(free), *[-1 if axis == time else 1 for axis in range(1, own.ndim)])
    return torch.where(free, own, ours.to(own.dtype))
