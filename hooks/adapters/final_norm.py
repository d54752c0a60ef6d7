"""Where a transformers backbone has its final norm: what turns the last layer's output into the backbone's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .survey import first_tensor


def final_norm_of(lm: Any) -> str:
    """Path of the final norm inside the backbone of a TransformersLM, found by running it; "": it has none.

    ValueError where no module does it alone.
    """
    last = lm.model.get_submodule(lm.layers[-1].path)
    calls: list[tuple[str, Tensor, Tensor]] = []  # modules outside the layers: path, input, output
    left: list[Tensor | None] = []

    def passes(path: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
            before, after = first_tensor(args, kwargs) if args or kwargs else None, first_tensor(out)
            if before is not None and after is not None and before.shape == after.shape:
                calls.append((path, before, after))

        return hook

    inside = {id(m) for layer in lm.layers for m in lm.model.get_submodule(layer.path).modules()}
    outside = [(n, m) for n, m in lm.backbone.named_modules() if n and id(m) not in inside]
    handles = [module.register_forward_hook(passes(path), with_kwargs=True) for path, module in outside]
    handles.append(last.register_forward_hook(lambda _m, _args, out: left.append(first_tensor(out))))
    tokens = torch.arange(8, device=next(lm.model.parameters()).device)[None] % lm.vocab_size
    try:
        with torch.no_grad():
            hidden = lm.hidden(tokens)
    finally:
        for handle in handles:
            handle.remove()
    stream = left[-1]
    assert stream is not None
    for path, before, after in calls:
        if _same(before, stream) and _same(after, hidden):
            return path
    if _same(stream, hidden):
        return ""
    raise ValueError(f"{type(lm.model).__name__}: no module maps its last layer's output to its hidden states")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b.to(a.device))
