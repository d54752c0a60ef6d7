"""A loaded model for nnsight's users: traces and interventions with caps and recordings on."""

from __future__ import annotations

from typing import Any

from ..checkpoint import load
from ..sites import refuse_compiled
from .transformers import TransformersLM


def to_nnsight(model: Any) -> Any:
    """The model under nnsight: a TransformersModel for transformers' models with a tokenizer, else NNsight.

    `model`: a loaded model, or a transformers model object. Nothing is copied: traces run the model's own modules,
    under whatever `model.cap`, `record`, `ablate` or `knockout` is on around them. Paths are the model's own:
    `blocks[3].attn` for a HybridLM, transformers' for its models. Raises RuntimeError for a compiled model.

    >>> traced = to_nnsight(model)
    >>> with model.cap(full=64), traced.trace(tokens): hidden = traced.blocks[3].output.save()
    """
    from nnsight import NNsight, TransformersModel

    model = load(model)
    if not isinstance(model, TransformersLM):
        refuse_compiled(model)
        return NNsight(model)
    refuse_compiled(model.model)
    if model.tokenizer is None:
        return NNsight(model.model)
    return TransformersModel(model.model, tokenizer=model.tokenizer, task="text-generation")
