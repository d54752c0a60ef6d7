"""What every loaded model offers, whatever it was loaded from: sites, switches, loss, generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import check_tokens
from .sites import Site, Sites

if TYPE_CHECKING:
    from .caps import Edit
    from .record import Record, Stats

LOSS_ELEMENTS = 2**26  # logits that a loss without gradients holds at once


class Instrumented:
    """Mixin over an nn.Module that sets `sites` and `tokenizer` and implements the methods at the end."""

    sites: Sites
    tokenizer: Any
    recorders: tuple[Record, ...] = ()
    shifts: int = 0  # MLPs that look one token back
    chained: frozenset[int] = frozenset()  # layers whose sites run one after the other, not side by side

    def cap(
        self,
        layers: Mapping[Any, SupportsIndex | None] | None = None,
        *,
        sinks: SupportsIndex = 0,
        **kinds: SupportsIndex | None,
    ) -> AbstractContextManager[None]:
        """Limit how far back sites see, in tokens, the query counted: by kind (`full=2048`, `recurrent=512`,
        `window=64`) or by layer or (layer, site) (`{3: 128}`). None lifts an outer cap. `sinks=n` leaves the
        first n keys visible to full and window sites, where they were visible without the cap.

        Raises ValueError for a kind or layer the model does not have, a cap that is no whole number, < 1 or smaller
        than a convolution, or sinks on a recurrent site.

        >>> with model.cap(full=2048, sinks=4): logits = model(tokens)
        """
        from .caps import cap

        return cap(self, layers, sinks=sinks, kinds=kinds)

    def record(
        self, *, resid: Any = None, stats: bool | Sequence[int] | Tensor | Stats = False, states: Any = None
    ) -> AbstractContextManager[Record]:
        """Record residual-stream vectors at token columns `resid` ("last", a list, or [B,P]), attention statistics of
        query rows `stats` (True: all; a list; or hs.Stats), and states of recurrent sites after the tokens at columns
        `states` ("last", a list, or [B,P]). See `record.Record` for what comes back.

        States of a capped site are refused: under a cap there is no single one.

        >>> with model.record(resid="last", stats=[-1]) as rec: model(tokens)
        """
        from .record import record

        return record(self, resid=resid, stats=stats, states=states)

    def ablate(
        self,
        heads: Sequence[tuple[int, ...]],
        how: Literal["zero", "mean"] = "zero",
        reference: Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """Replace the outputs of heads (layer, head) or (layer, site, head), before the output projection, by
        zero or by their mean over `reference` tokens [B,T] (over the running call's own real tokens where
        none are given).

        Raises ValueError for a head the model does not have.
        """
        from .caps import ablate

        return ablate(self, heads, how, reference)

    def edit(self, edits: Mapping[Site, Edit]) -> AbstractContextManager[None]:
        """Change the head outputs z [B,T,H,V] of sites, before the output projection: `edits` maps a site to a function
        of z and of which tokens [B,T] are real (None: all), which returns the new z and leaves z itself alone. Applied
        after the edits of blocks around this one.

        Raises ValueError for a site whose heads are not reached.

        >>> with model.edit({model.sites[3]: lambda z, real: 0.5 * z}): logits = model(tokens)
        """
        from .caps import edit

        return edit(self, edits)

    def knockout(
        self,
        *,
        rows: Any,
        keys: Any,
        layers: Sequence[int] | None = None,
        heads: Sequence[tuple[int, ...]] | None = None,
    ) -> AbstractContextManager[None]:
        """Forbid query rows to attend to keys; the softmax renormalises over what is left.

        `rows`: columns, a list or [B,R]. `keys`: columns, a list, or a bool mask [T] or [B,T]. On the softmax
        sites of `layers` (None: all), or only on `heads`. A row that loses every key reads zeros.

        Empty lists forbid nothing. Raises ValueError for rows or keys that are no columns, and where what is named, or
        the whole model, has no softmax.
        """
        from .caps import knockout

        return knockout(self, rows, keys, layers, heads)

    def reach(self) -> int | None:
        """How many tokens back the whole stack can see under the present caps; None: unbounded.

        m layers of reach w in a row see m (w - 1) + 1 tokens; each RWKV channel mix one more. Sites side by side in
        one layer count once, the farthest-reaching one.
        """
        reaches = [self.reach_of(layer) for layer in sorted({site.layer for site in self.sites})]
        bounded = [reach for reach in reaches if reach is not None]
        return None if len(bounded) < len(reaches) else 1 + self.shifts + sum(reach - 1 for reach in bounded)

    def reach_of(self, layer: int) -> int | None:
        """How many tokens back the sites of one layer can see, by themselves; None: unbounded."""
        reaches = [site.reach for site in self.sites if site.layer == layer]
        steps = [reach - 1 for reach in reaches if reach is not None]
        if len(steps) < len(reaches):
            return None
        return 1 + (sum(steps) if layer in self.chained else max(steps, default=0))

    def loss(self, tokens: Tensor, per_token: bool = False, attention_mask: Tensor | None = None) -> Tensor:
        """Next-token cross entropy in nats: the mean, or per token [B,T-1].

        Under a mask every real token is predicted from the real token before it; the per-token loss is 0 at
        padding and at a row's first token. Without gradients logits are made a stretch of tokens at a time.
        """
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise ValueError(f"tokens: shape {tuple(tokens.shape)}; a loss needs [B,T] with T >= 2")
        hidden = self.hidden(tokens, attention_mask)
        counted = None
        if attention_mask is not None:
            real = attention_mask.bool()
            columns = torch.arange(tokens.shape[1], device=tokens.device)
            latest = (columns * real).cummax(1).values  # the last real token so far
            hidden = hidden.gather(1, latest[..., None].expand_as(hidden))
            counted = real[:, 1:] & (real.cumsum(1)[:, :-1] > 0)
        hidden = hidden[:, :-1]
        step = hidden.shape[1]
        if not torch.is_grad_enabled():
            step = max(1, LOSS_ELEMENTS // (hidden.shape[0] * self.vocab_size))
        parts = []
        for start in range(0, hidden.shape[1], step):
            logits = self.unembed_hidden(hidden[:, start : start + step])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            target = tokens[:, start + 1 : start + 1 + logits.shape[1]]
            parts.append(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape))
        losses = torch.cat(parts, 1)
        if counted is None:
            return losses if per_token else losses.mean()
        return losses.masked_fill(~counted, 0) if per_token else losses[counted].mean()

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, max_new_tokens: int, attention_mask: Tensor | None = None,
        temperature: float = 0.0, generator: torch.Generator | None = None, eos_token_id: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Continue [B,T] token ids by up to `max_new_tokens`, greedily at temperature 0: [B,T+n], under caps.

        Padding in `attention_mask` may stand anywhere. Rows that have met `eos_token_id` repeat it; decoding
        stops when all have.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens}: expected >= 0")
        check_tokens(tokens)
        self.check_length(tokens.shape[1] + max(0, max_new_tokens - 1))  # the last token is not read back
        cache = self.new_cache()
        out, step, mask = tokens, tokens, attention_mask
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        last = torch.full((tokens.shape[0],), tokens.shape[1] - 1, device=tokens.device)
        if mask is not None:
            columns = torch.arange(tokens.shape[1], device=tokens.device)
            last = (columns * mask.bool()).amax(1)
        for _ in range(max_new_tokens):
            hidden = self.hidden(step, mask, cache=cache)
            picked = hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))
            logits = self.unembed_hidden(picked)[:, 0]
            if temperature > 0:
                chances = (logits.float() / temperature).softmax(-1)
                step = torch.multinomial(chances, 1, generator=generator)
            else:
                step = logits.argmax(-1, keepdim=True)
            if eos_token_id is not None:
                step = torch.where(done[:, None], eos_token_id, step)
                done |= step[:, 0] == eos_token_id
            out = torch.cat([out, step], 1)
            mask, last = None, torch.zeros_like(last)
            if eos_token_id is not None and bool(done.all()):
                break
        return out

    @property
    def depth(self) -> int:
        """How many layers the model has."""
        return 1 + max((site.layer for site in self.sites), default=-1)

    def check_length(self, length: int) -> None:
        """ValueError when `length` tokens exceed the model's context."""
        if self.context is not None and length > self.context:
            raise ValueError(f"tokens: {length} are longer than the model's context of {self.context}")

    def __getstate__(self) -> dict[str, Any]:
        """A copy records for nobody, as its sites' switches are off (`Site.__getstate__`)."""
        state = super().__getstate__()
        assert isinstance(state, dict)
        return {**state, "recorders": ()}

    # What a source implements.
    context: int | None
    vocab_size: int

    def hidden(self, tokens: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Tensor:
        """Residual stream after the last layer and the final norm, [B,T,D]."""
        raise TypeError(f"{type(self).__name__} must implement hidden()")

    def final_norm(self, resid: Tensor) -> Tensor:
        """`hidden` from the residual stream after the last layer, [B,T,D]."""
        raise TypeError(f"{type(self).__name__} must implement final_norm()")

    def unembed_hidden(self, hidden: Tensor) -> Tensor:
        """Logits [B,T,vocab] from `hidden`."""
        raise TypeError(f"{type(self).__name__} must implement unembed_hidden()")

    def new_cache(self) -> Any:
        """An empty decode cache for `hidden`."""
        raise TypeError(f"{type(self).__name__} must implement new_cache()")

    def embedding(self) -> torch.nn.Module:
        """The module that turns token ids into vectors [B,T,D]."""
        raise TypeError(f"{type(self).__name__} must implement embedding()")
