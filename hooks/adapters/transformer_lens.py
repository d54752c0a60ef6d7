"""A loaded model for TransformerLens' users: TransformerBridge on the same weights."""

from __future__ import annotations

import copy
from typing import Any

from ..checkpoint import load
from ..model import HybridLM
from ..sites import refuse_compiled
from .transformers import TransformersLM


def to_transformer_lens(model: Any) -> Any:
    """TransformerLens' view of a model: a TransformerBridge for transformers' models, on the same parameters.

    `model`: a loaded model, or a transformers model object. The bridge rewires a model, so it gets modules of its own;
    only parameters and buffers are shared. It runs transformers' eager attention (patterns are hook points there),
    without the caps and recordings of `model`. A HybridLM is returned as it is: it is a HookedRootModule already, and
    its caps apply.

    Raises ValueError for a family that TransformerLens does not know.

    >>> bridge = to_transformer_lens(hs.load("smollm2"))
    >>> logits, cache = bridge.run_with_cache("The grass is")
    """
    model = load(model)
    if isinstance(model, HybridLM):
        return model
    assert isinstance(model, TransformersLM)
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
    from transformer_lens.model_bridge.sources import build_bridge_from_module, detect_tokenizer_bos_eos

    refuse_compiled(model.model)
    name = type(model.model).__name__
    if name not in SUPPORTED_ARCHITECTURES:
        raise ValueError(f"to_transformer_lens: TransformerLens has no adapter for {name}")
    shared = {id(x): x for x in (*model.model.parameters(), *model.model.buffers())}
    rewired = copy.deepcopy(model.model, shared)
    rewired.set_attn_implementation("eager")
    bridge: Any = build_bridge_from_module(rewired, name, hf_config=rewired.config, model_name=name)
    if model.tokenizer is not None:  # given to the builder, it would be read anew from where it came from
        bridge.tokenizer = copy.deepcopy(model.tokenizer)
        bridge.cfg.tokenizer_prepends_bos, bridge.cfg.tokenizer_appends_eos = detect_tokenizer_bos_eos(bridge.tokenizer)
    return bridge
