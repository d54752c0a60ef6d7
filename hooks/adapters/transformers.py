"""transformers causal language models as instrumented models.

The model's own code runs; only its attention goes through `hooks/attend.py` (see `interface.py`), and only
while this library runs it or one of its switches is on: outside, a model object that the caller passed in is
as it was.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..caps import Edit
from ..checkpoint import check_finite
from ..inputs import check_tokens, check_vocabulary, real_tokens
from ..instrumented import Instrumented
from ..record import Stats
from ..sites import Site, Sites, refuse_compiled
from .final_norm import final_norm_of
from .interface import Attachment
from .pretrained import read, without_fla
from .rings import CACHE_NAMES, cache_in, seen
from .survey import Mid, first_tensor, survey

Value = TypeVar("Value")


class DecodeCache:
    """A transformers cache, made by the model's first call, and the padding seen so far."""

    def __init__(self) -> None:
        self.past: Any = None
        self.tokens: Tensor | None = None  # of a model without a cache: the whole context, run again at every call
        self.real: Tensor | None = None
        self.seen = 0


class TransformersLM(Instrumented, nn.Module):
    """A transformers causal LM (`.model`) with sites, switches and recording.

    `model(tokens)` maps [B,T] token ids to logits [B,T,vocab]. `attention_mask` [B,T] (1: real) marks
    padding, with the model's own meaning: RoPE and windows count columns. `cache` (from `new_cache()`)
    continues an earlier call; generation left-aligns padding first, so that columns inside it count from
    there. Several wrappers of one model share its sites. Sites whose mixer is not reached are marked
    `opaque`: they take no cap and no ablation.
    """

    def __init__(self, model: Any, tokenizer: Any = None, context: int | None = None) -> None:
        super().__init__()
        found = survey(model)
        self.model = model
        self.sites: Sites = found.sites
        self.tokenizer = tokenizer
        self.recorders: tuple[Any, ...] = ()
        text = model.config.get_text_config(decoder=True)
        self.vocab_size: int = text.vocab_size
        self.context = context or getattr(text, "max_position_embeddings", None)
        self.layers = found.layers
        self.chained = frozenset(number for number, layer in enumerate(found.layers) if layer.chained)
        self._backbone = found.backbone
        self._head_fits = True
        with torch.no_grad():
            again = self.unembed_hidden(found.hidden)
        self._head_fits = torch.allclose(again.float(), found.logits.float(), rtol=1e-2, atol=1e-3)
        self._watched = False
        self._norm: str | None = None  # path of the final norm in the backbone, once it was looked for

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no hooks of its own yet."""
        return {**super().__getstate__(), "_watched": False}

    # The interface

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: DecodeCache | None = None) -> Tensor:
        return self._run(self.model, "logits", tokens, attention_mask, cache)

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: DecodeCache | None = None) -> Tensor:
        """Residual stream after the final norm, [B,T,D]."""
        return self._run(self.backbone, "last_hidden_state", tokens, attention_mask, cache)

    def final_norm(self, resid: Tensor) -> Tensor:
        if self._norm is None:
            self._norm = final_norm_of(self)
        return resid if not self._norm else self.backbone.get_submodule(self._norm)(resid)

    def unembed_hidden(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, by the model's own head: its scales and soft caps included."""
        if not self._head_fits:
            raise ValueError(f"{type(self.model).__name__}: its head cannot be run on its own; call the model instead")
        head: Any = _Replaced(self.model, self._backbone.split("."), hidden)
        placeholder = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        return type(self.model).forward(head, input_ids=placeholder, use_cache=False).logits.to(hidden.device)

    def new_cache(self) -> DecodeCache:
        return DecodeCache()

    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def backbone(self) -> nn.Module:
        """The model without its head: embedding, layers, final norm."""
        return self.model.get_submodule(self._backbone)

    @property
    def depth(self) -> int:
        return len(self.layers)

    def generate(
        self, tokens: Tensor, max_new_tokens: int, attention_mask: Tensor | None = None, *args: Any,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """See `Instrumented.generate`."""
        real = self._check(tokens, attention_mask)
        aligned = tokens
        if real is not None:
            order = real.int().argsort(dim=1, stable=True)  # padding first, real tokens in order
            if not torch.equal(real.gather(1, order), real):
                if any(site.knockout or site.tap for site in self.sites) or self.recorders:
                    raise ValueError("generate: record and knockout need padding on the left")
                aligned, real = tokens.gather(1, order), real.gather(1, order)
        out = super().generate(aligned, max_new_tokens, real, *args, **options)
        return torch.cat([tokens, out[:, tokens.shape[1] :]], 1)

    # Switches: our attention is on for as long as one of them is

    def cap(self, layers: Any = None, *, sinks: int = 0, **kinds: int | None) -> AbstractContextManager[None]:
        return self._switched_on(super().cap(layers, sinks=sinks, **kinds))

    def record(
        self, *, resid: Any = None, stats: bool | Sequence[int] | Tensor | Stats = False, states: Any = None
    ) -> AbstractContextManager[Any]:
        watch = resid is not None or states is not None or (isinstance(stats, Stats) and stats.recurrent)
        return self._switched_on(super().record(resid=resid, stats=stats, states=states), watch=watch)

    def ablate(
        self,
        heads: Sequence[tuple[int, ...]],
        how: Literal["zero", "mean"] = "zero",
        reference: Tensor | None = None,
    ) -> AbstractContextManager[None]:
        return self._switched_on(super().ablate(heads, how, reference))

    def edit(self, edits: Mapping[Site, Edit]) -> AbstractContextManager[None]:
        return self._switched_on(super().edit(edits))

    def knockout(self, **what: Any) -> AbstractContextManager[None]:
        return self._switched_on(super().knockout(**what))

    @contextlib.contextmanager
    def _switched_on(self, block: AbstractContextManager[Value], watch: bool = False) -> Iterator[Value]:
        refuse_compiled(self.model)
        watching = self._watching() if watch and not self._watched else contextlib.nullcontext()
        with Attachment.of(self.model).on(), watching, block as value:
            yield value

    # Forward passes

    def _run(
        self, module: Any, output: str, tokens: Tensor, attention_mask: Tensor | None, cache: DecodeCache | None
    ) -> Tensor:
        real = padding = self._check(tokens, attention_mask)
        if cache is not None:
            self.check_length(cache.seen + tokens.shape[1])
            if real is not None or cache.real is not None:
                ones = torch.ones_like(tokens, dtype=torch.bool)
                before = ones.new_ones(tokens.shape[0], cache.seen) if cache.real is None else cache.real
                real = padding = torch.cat([before, ones if real is None else real], 1)
            if cache.tokens is not None:
                cache.real = padding
                return self._run_again(module, output, tokens, real, cache)
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
        if cache is not None and cache.past is not None:
            inputs[self._cache_name] = cache.past
            if "position_ids" in inspect.signature(type(self.backbone).forward).parameters:
                # As `generate` does; some models would start at position 0 again.
                inputs["position_ids"] = cache.seen + torch.arange(tokens.shape[1], device=tokens.device)[None]
        if real is not None and not any(site.softmax for site in self.sites):
            real = real[:, -tokens.shape[1] :]  # states have passed over earlier padding; some models take no more
            real = None if bool(real.all()) else real
        if real is not None:
            inputs["attention_mask"] = real.long()
        with Attachment.of(self.model).on():
            out = module(**inputs)
        if cache is not None:  # only now: a call that is refused leaves the cache as it was
            cache.real = padding
            cache.past = getattr(out, self._cache_name, None)
            cache.tokens = tokens if cache.past is None else None
            cache.seen += tokens.shape[1]
        return getattr(out, output).to(tokens.device)  # a backbone over several devices ends on its last one

    def _run_again(self, module: Any, output: str, tokens: Tensor, real: Tensor | None, cache: DecodeCache) -> Tensor:
        """Continue a context of a model that returns no cache: all of it, for the outputs of its last tokens."""
        if self.recorders or any(site.tap for site in self.sites):
            name = type(self.model).__name__
            raise ValueError(f"record: {name} keeps no cache; give it the whole context in one call")
        assert cache.tokens is not None
        cache.tokens = torch.cat([cache.tokens, tokens], 1)
        cache.seen = cache.tokens.shape[1]
        mask = {} if real is None else {"attention_mask": real.long()}
        with Attachment.of(self.model).on():
            out = module(input_ids=cache.tokens, use_cache=False, **mask)
        return getattr(out, output)[:, -tokens.shape[1] :].to(tokens.device)

    @property
    def _cache_name(self) -> str:
        accepted = inspect.signature(type(self.backbone).forward).parameters
        return next((name for name in CACHE_NAMES if name in accepted), CACHE_NAMES[0])

    def _check(self, tokens: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        check_tokens(tokens)
        self.check_length(tokens.shape[1])
        check_vocabulary(tokens, self.vocab_size)
        if attention_mask is None:
            return None
        real, everywhere = real_tokens(tokens, attention_mask)
        return None if everywhere else real

    # Recording the residual stream

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Hooks that hand residual streams to the recorders, for the length of a block."""
        inputs: dict[int, Tensor] = {}
        handles: list[Any] = []

        def keep(number: int, where: str, x: Tensor | None) -> None:
            if x is None or x.ndim != 3:
                raise ValueError(f"resid: layer {number} of {type(self.model).__name__} has no [B,T,D] stream")
            for rec in self.recorders:
                rec.keep(number, where, x)

        def starts(module: nn.Module, args: Any, kwargs: Any) -> None:
            mask, tokens = kwargs.get("attention_mask"), kwargs.get("input_ids", kwargs.get("inputs_embeds"))
            if not isinstance(mask, Tensor) or mask.ndim != 2 or tokens is None:
                real = None
            else:
                real = mask[:, mask.shape[1] - tokens.shape[1] :].bool()
            past = cache_in(kwargs)
            first = 0 if past is None else seen(past)
            shape = None if tokens is None else (tokens.shape[0], tokens.shape[1])
            for rec in self.recorders:
                rec.start(real, first, shape)

        def watch(module: nn.Module, before: Any = None, after: Any = None) -> None:
            # A copy of the model made in here carries these hooks along: they stay silent on it.
            if before is not None:
                handles.append(
                    module.register_forward_pre_hook(
                        lambda m, args, kwargs: before(first_tensor(args, kwargs)) if m is module else None,
                        with_kwargs=True,
                    )
                )
            if after is not None:
                handles.append(
                    module.register_forward_hook(lambda m, args, out: after(first_tensor(out)) if m is module else None)
                )

        def watch_layer(number: int, path: str, mid: Mid | None) -> None:
            def enters(x: Tensor | None) -> None:
                keep(number, "pre", x)
                assert x is not None
                inputs[number] = x

            def adds(x: Tensor | None) -> None:
                assert mid is not None
                keep(number, "mid", None if x is None else inputs[number].to(x.device) + mid.scale * x)

            def passes(x: Tensor | None) -> None:
                keep(number, "mid", None if x is None else x.reshape(inputs[number].shape))

            layer = self.model.get_submodule(path)
            watch(layer, before=enters)
            if all(site.layer != number for site in self.sites):  # no mixer: nothing was added
                watch(layer, before=lambda x: keep(number, "mid", x))
            if mid is not None and mid.end == "input":
                watch(layer.get_submodule(mid.path), before=passes)
            elif mid is not None:
                watch(layer.get_submodule(mid.path), after=adds)
            watch(layer, after=lambda x: keep(number, "post", x))

        backbone = self.backbone
        handles.append(
            backbone.register_forward_pre_hook(
                lambda m, args, kwargs: starts(m, args, kwargs) if m is backbone else None, with_kwargs=True
            )
        )
        self._watched = True
        try:
            for number, layer in enumerate(self.layers):
                watch_layer(number, layer.path, layer.mid)
            yield
        finally:
            self._watched = False
            for handle in handles:
                handle.remove()


class _Replaced:
    """Stands in for a model in a forward() of its: all is the model's, but the module at `path` has run
    already and gives `hidden`."""

    def __init__(self, module: Any, path: list[str], hidden: Tensor) -> None:
        self._module, self._hidden = module, hidden
        if path:
            setattr(self, path[0], _Replaced(getattr(module, path[0]), path[1:], hidden))

    def __call__(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self._hidden)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Output:
    """A backbone's output with nothing in it but hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


# Loading


def load(
    source: Any, *, revision: str | None = None, dtype: torch.dtype | str | None = None,
    device_map: Any = None, trust_remote_code: Any = False, context: int | None = None, **unknown: Any,
) -> TransformersLM:  # fmt: skip
    """A transformers model, instrumented: from a checkpoint folder (safetensors, or a GGUF file), a hub id,
    or an object.

    `dtype` defaults to the checkpoint's; `context` to the config's longest position. A folder's tokenizer
    comes along where there is one. The object form changes nothing about the model outside our own calls.

    Raises FileNotFoundError for what is not there, OSError when the hub cannot be reached, ValueError for an
    unknown option, a model type that transformers does not know, remote code that was not asked for, weights
    that are truncated, missing or do not fit the config, and NaN weights; each in one line that names the
    thing.
    """
    if unknown:
        known = "revision, dtype, device_map, trust_remote_code, context"
        raise ValueError(f"{sorted(unknown)[0]}: unknown option for a transformers model; it takes {known}")
    if not isinstance(trust_remote_code, bool | None):  # "no" would be true
        raise ValueError(f"trust_remote_code={trust_remote_code!r}: expected True or False")
    if context is not None and (not isinstance(context, int) or context < 1):
        raise ValueError(f"context={context!r}: expected a number of tokens >= 1")
    if isinstance(source, TransformersLM):
        source = source.model
    if isinstance(source, nn.Module):
        if revision or dtype is not None or device_map is not None or trust_remote_code:
            raise ValueError("revision, dtype, device_map, trust_remote_code: only for models loaded from disk or hub")
        model, tokenizer, where = source, None, type(source).__name__
        if hasattr(model, "_orig_mod") or not hasattr(model, "get_input_embeddings"):
            raise ValueError(f"{where}: expected a transformers causal LM (uncompiled), a folder or a hub id")
    else:
        where = str(source)
        if isinstance(source, os.PathLike) and not os.path.exists(source):
            raise FileNotFoundError(f"{where}: no such folder")
        options: dict[str, Any] = {"trust_remote_code": bool(trust_remote_code)}  # None would ask at the terminal
        options |= {} if revision is None else {"revision": revision}
        with without_fla():
            model, tokenizer = read(where, options, dtype, device_map)
    check_finite(((n, p) for n, p in model.named_parameters() if p.device.type != "meta"), where)
    return TransformersLM(model, tokenizer, context)
