"""hybridscope: what each layer of a hybrid language model retrieves, and when in training it learned to.

Public names load on first use: `import hybridscope` imports neither torch nor TransformerLens.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "HybridConfig": "hooks.config",
    "ratio": "hooks.config",
    "HybridLM": "hooks.model",
    "Site": "hooks.sites",
    "Stats": "hooks.record",
    "AttentionStats": "hooks.kernels.attention_stats",
    "attention_stats": "hooks.kernels.attention_stats",
    "ImplicitStats": "hooks.kernels.implicit_stats",
    "implicit_stats": "hooks.kernels.implicit_stats",
    "MeanStats": "hooks.reduce",
    "use_kernels": "hooks.kernels.dispatch",
    "load": "hooks.checkpoint",
    "ladder": "hooks.ladder",
    "to_transformer_lens": "hooks.adapters.transformer_lens",
    "to_nnsight": "hooks.adapters.nnsight",
    "make_needles": "probes.needles",
    "needles_from_texts": "probes.needles",
    "needle_accuracy": "probes.needles",
    "Needles": "probes.needles",
    "probe_layers": "probes.layerwise",
    "probe_gains": "probes.layerwise",
    "LayerwiseProbe": "probes.layerwise",
    "cap_sweep": "probes.capsweep",
    "layer_importance": "probes.importance",
    "retrieval_heads": "probes.retrieval",
    "causal_check": "probes.causal",
    "track": "probes.tracking",
    "formation_step": "probes.formation",
    "qk_drift": "probes.drift",
    "activation_drift": "probes.activation_drift",
    "gradient_influence": "probes.influence",
    "perplexity": "probes.perplexity",
    "long_context_gain": "probes.perplexity",
    "key_tokens": "probes.longppl",
    "long_perplexity": "probes.longppl",
    "scaling_fit": "probes.scaling",
    "logit_lens": "probes.lens",
    "patch_heads": "probes.patching",
    "cost": "probes.cost",
    "TokenLanguage": "probes.haystacks",
    "language_of": "experiments.sources",
}

__all__ = [
    "AttentionStats",
    "HybridConfig",
    "HybridLM",
    "ImplicitStats",
    "LayerwiseProbe",
    "MeanStats",
    "Needles",
    "Site",
    "Stats",
    "TokenLanguage",
    "__version__",
    "activation_drift",
    "attention_stats",
    "cap_sweep",
    "causal_check",
    "cost",
    "figures",
    "formation_step",
    "gradient_influence",
    "implicit_stats",
    "key_tokens",
    "ladder",
    "language_of",
    "layer_importance",
    "load",
    "logit_lens",
    "long_context_gain",
    "long_perplexity",
    "make_needles",
    "needle_accuracy",
    "needles_from_texts",
    "patch_heads",
    "perplexity",
    "probe_gains",
    "probe_layers",
    "qk_drift",
    "ratio",
    "retrieval_heads",
    "scaling_fit",
    "to_nnsight",
    "to_transformer_lens",
    "track",
    "use_kernels",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in ("hooks", "probes", "experiments", "figures"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from . import figures
    from .experiments.sources import language_of
    from .hooks.adapters.nnsight import to_nnsight
    from .hooks.adapters.transformer_lens import to_transformer_lens
    from .hooks.checkpoint import load
    from .hooks.config import HybridConfig, ratio
    from .hooks.kernels.attention_stats import AttentionStats, attention_stats
    from .hooks.kernels.dispatch import use_kernels
    from .hooks.kernels.implicit_stats import ImplicitStats, implicit_stats
    from .hooks.ladder import ladder
    from .hooks.model import HybridLM
    from .hooks.record import Stats
    from .hooks.reduce import MeanStats
    from .hooks.sites import Site
    from .probes.activation_drift import activation_drift
    from .probes.capsweep import cap_sweep
    from .probes.causal import causal_check
    from .probes.cost import cost
    from .probes.drift import qk_drift
    from .probes.formation import formation_step
    from .probes.haystacks import TokenLanguage
    from .probes.importance import layer_importance
    from .probes.influence import gradient_influence
    from .probes.layerwise import LayerwiseProbe, probe_gains, probe_layers
    from .probes.lens import logit_lens
    from .probes.longppl import key_tokens, long_perplexity
    from .probes.needles import Needles, make_needles, needle_accuracy, needles_from_texts
    from .probes.patching import patch_heads
    from .probes.perplexity import long_context_gain, perplexity
    from .probes.retrieval import retrieval_heads
    from .probes.scaling import scaling_fit
    from .probes.tracking import track
