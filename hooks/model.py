"""HybridLM: a decoder whose layers mix full attention, windows and recurrences as its pattern says."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_lens import HookedRootModule
from transformer_lens.hook_points import HookPoint

from .config import HybridConfig, whole_number
from .documents import Documents
from .inputs import check_tokens, check_vocabulary, real_tokens
from .instrumented import Instrumented
from .mixers import Mixer, Parallel, build
from .mixers.channel_mix import ChannelMix6, ChannelMix7
from .mixers.hgrn import HGRN, cumulative
from .mixers.hgrn2 import HGRN2
from .mixers.layers import RMSNorm
from .mixers.recurrent import init_linears
from .passes import Cache, Pass, Shapes
from .record import Record
from .sites import Sites, refuse_compiled, refuse_switches


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        assert config.d_ff is not None
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def init_weights(self, std: float) -> None:
        init_linears(self, std)


def residual_norm(config: HybridConfig) -> nn.Module:
    """A norm of the residual stream, of the kind `config.norm`."""
    kind = RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(config.d_model, config.norm_eps)


class Block(nn.Module):
    """x + mixer(norm x), then x + MLP(norm x). A layer of RWKV alone has RWKV's channel mix for an MLP."""

    mlp: MLP | ChannelMix7

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.ln1 = residual_norm(config)
        self.attn = build(config, layer)
        self.ln2 = residual_norm(config)
        own = {"rwkv6": ChannelMix6, "rwkv7": ChannelMix7}.get(config.layers[layer])
        self.mlp = MLP(config) if own is None else own(config, layer)
        self.hook_resid_pre, self.hook_resid_mid, self.hook_resid_post = HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint()

    def forward(self, x: Tensor, run: Pass, recorders: tuple[Record, ...] = ()) -> Tensor:
        x = self._seen("pre", self.hook_resid_pre(x), recorders)
        x = x + self.hook_attn_out(self.attn(self.ln1(x), run))
        x = self._seen("mid", self.hook_resid_mid(x), recorders)
        x = x + self.hook_mlp_out(self.mlp(self.ln2(x), run))
        return self._seen("post", self.hook_resid_post(x), recorders)

    def cached(self, batch: int) -> dict[str, Shapes]:
        """What a cache of the layer holds, by site (or token shift)."""
        parts = self.mixers if isinstance(self.mlp, MLP) else [*self.mixers, self.mlp]
        return {name: held for part in parts for name, held in part.cached(batch).items()}

    @property
    def mixers(self) -> list[Mixer]:
        """The layer's mixers: one, or the parallel ones."""
        return self.attn.mixers if isinstance(self.attn, Parallel) else [self.attn]

    def _seen(self, where: str, x: Tensor, recorders: tuple[Record, ...]) -> Tensor:
        for rec in recorders:
            rec.keep(self.layer, where, x)
        return x


class HybridLM(Instrumented, HookedRootModule):
    """A hybrid language model with TransformerLens hook points and run-time switches.

    `model(tokens)` maps [B,T] token ids to logits [B,T,vocab]. `attention_mask` [B,T] (1: real) may pad
    anywhere; logits at padding mean nothing. `cache` continues an earlier call. `documents` [B,T] numbers packed
    documents, which do not see each other; inside the pass (hooks, recorders) each is a sample of its own, whose
    columns count from its first token. Raises ValueError for ids outside the vocabulary, more tokens than
    `config.context`, a mask with values other than 0 and 1, and a cache made by another model or with other samples (it
    stays as it was).

    >>> model = HybridLM(HybridConfig(("swa:64", "full"), 4, 128, 4, 1000))
    >>> with model.cap(full=32): logits = model(tokens)
    """

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.context = config.context
        self.vocab_size = config.vocab_size
        self.tokenizer: Any = None
        self.notes: dict[str, Any] = {}  # what a checkpoint's config.json says beside the model's config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.hook_embed = HookPoint()
        self.ln_embed = residual_norm(config) if config.norm == "layer" else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.ln_final = residual_norm(config)
        self.unembed = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.unembed.weight = self.embed.weight
        deep = [mixer for block in self.layers[1:] for mixer in block.mixers]  # the first layer's gates have no bound
        bounded = any(isinstance(mixer, HGRN | HGRN2) and mixer.bounded for mixer in deep)
        self.lower_bounds = nn.Parameter(torch.zeros(config.n_layers, config.d_model)) if bounded else None
        self.init_weights()
        self.setup()  # names the hook points

    def forward(
        self, tokens: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.unembed_hidden(self.hidden(tokens, attention_mask, cache, documents))

    def hidden(
        self, tokens: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Residual stream after the final norm, [B,T,D]."""
        check_tokens(tokens)
        if documents is not None:
            return self._packed(tokens, attention_mask, cache, documents)
        return self._pass(tokens, attention_mask, cache)

    def _pass(
        self, tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None, documents: Documents | None = None
    ) -> Tensor:
        first = 0 if cache is None else cache.columns
        real = self._check(tokens, attention_mask, first)
        B, T = tokens.shape
        if cache is not None:
            cache.check_caps(self.sites)
            cache.check_shapes({name: held for block in self.layers for name, held in block.cached(B).items()})
        run = Pass(real, cache, B, T, tokens.device, documents)
        for rec in self.recorders:
            rec.start(real, first, (B, T))
        if self.lower_bounds is not None:
            run.shared["lower_bounds"] = cumulative(self.lower_bounds)
        x = self.ln_embed(self.hook_embed(self.embed(tokens)))
        for block in self.layers:
            x = block(x, run, self.recorders)
        if cache is not None:
            cache.columns += T
        return self.final_norm(x)

    def _packed(
        self, tokens: Tensor, attention_mask: Tensor | None, cache: Cache | None, ids: Tensor
    ) -> Tensor:  # fmt: skip
        """`hidden` of packed documents."""
        if cache is not None:
            raise ValueError("documents: a cache continues one context; packed documents are for whole passes")
        if ids.shape != tokens.shape or ids.is_floating_point():
            raise ValueError(
                f"documents: {ids.dtype} of shape {tuple(ids.shape)}; expected a whole number for each of the "
                f"tokens {tuple(tokens.shape)}"
            )
        documents = Documents.of(ids, None if attention_mask is None else real_tokens(tokens, attention_mask)[0])
        return documents.pack(self._pass(documents.unpack(tokens), documents.mask, None, documents))

    def _check(self, tokens: Tensor, attention_mask: Tensor | None, first: int) -> Tensor | None:
        if torch.compiler.is_compiling():
            if self.recorders or self.context_level or any(site.active for site in self.sites):
                refuse_switches()
            return None
        self.check_length(first + tokens.shape[1])
        check_vocabulary(tokens, self.vocab_size)
        if attention_mask is None:
            return None
        real, everywhere = real_tokens(tokens, attention_mask)
        return None if everywhere else real

    def final_norm(self, resid: Tensor) -> Tensor:
        return self.ln_final(resid)

    def unembed_hidden(self, hidden: Tensor) -> Tensor:
        return self.unembed(hidden)

    def hooks(self, *args: Any, **kwargs: Any) -> Any:
        """TransformerLens' context manager; RuntimeError on a compiled model, where hooks never fire."""
        refuse_compiled(self)
        return super().hooks(*args, **kwargs)

    def new_cache(self) -> Cache:
        return Cache()

    def embedding(self) -> nn.Module:
        return self.embed

    @property
    def shifts(self) -> int:
        """Layers whose MLP looks one token back (RWKV's channel mix); `reach` counts them."""
        return sum(not isinstance(block.mlp, MLP) for block in self.layers)

    @property
    def sites(self) -> Sites:
        """The mixers, in layer order."""
        return Sites(mixer.site for block in self.layers for mixer in block.mixers)

    @property
    def layers(self) -> list[Block]:
        """The blocks, typed."""
        return cast(list[Block], list(self.blocks))

    def set_window(self, window: int) -> None:
        """Give every swa site the native window W = `window`, in the config too; ValueError without such sites."""
        width = whole_number(window)
        if width is None:
            raise ValueError(f"window={window!r}: expected a whole number >= 1")
        if not any("swa:" in layer for layer in self.config.layers):
            raise ValueError(f"window={window}: no swa site to set it on; layers {', '.join(self.config.layers)}")
        pattern = [re.sub(r"swa:\d+", f"swa:{width}", layer) for layer in self.config.layers]
        self.config = dataclasses.replace(self.config, pattern=pattern)
        for site in self.sites:
            if site.mixer.startswith("swa:"):
                site.window, site.mixer = width, f"swa:{width}"

    def save(self, folder: str | Path) -> None:
        """Write config.json, model.safetensors and the tokenizer, atomically; see `checkpoint.save`."""
        from .checkpoint import save

        save(self, folder)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Embeddings Normal(0, 0.02), matrices Normal(0, init_std); mixers add their published gates."""
        nn.init.normal_(self.embed.weight, std=0.02)
        if not self.config.tie_embeddings:
            nn.init.normal_(self.unembed.weight, std=0.02)
        std = self.config.init_std
        for block in self.layers:
            for mixer in block.mixers:
                mixer.init_weights(std)
            block.mlp.init_weights(std)
