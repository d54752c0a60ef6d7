"""The same suite, and any other task, through lm-eval, whose data come from a hub: our models as its `LM`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..probes.haystacks import encode
from .answers import continuations, loglikelihoods, pair, tokenizer_of

if TYPE_CHECKING:
    import pandas as pd

NAMES = {"lambada": "lambada_openai"}  # where lm-eval's name is another
LENGTH = 256  # most tokens that an answer without a limit gets


def harness_lm(model: Any, batch: int = 8) -> Any:
    """`model` as an `lm_eval.api.model.LM`: greedy, with its own caches, under caps that are in force.

    Raises ImportError without lm-eval, ValueError for a model without a tokenizer.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ImportError("lm-eval is not installed: pip install 'hybridscope[eval]'")
    from lm_eval.api.model import LM

    tokenizer = tokenizer_of(model)

    class Instrumented(LM):
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            pairs = [pair(tokenizer, *request.args) for request in requests]
            return [(s.logprob, s.greedy) for s in loglikelihoods(model, pairs, batch)]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            pairs = [pair(tokenizer, "", request.args[0]) for request in requests]
            return [s.logprob for s in loglikelihoods(model, pairs, batch)]

        def generate_until(self, requests: Any) -> list[str]:
            return [self._generate(*request.args) for request in requests]

        def _generate(self, context: str, options: dict[str, Any]) -> str:
            if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                raise ValueError("lm-eval: a task that samples; answers here are greedy")
            new = int(options.get("max_gen_toks", LENGTH))
            ids = encode(tokenizer, context)[0]
            if model.context is not None:
                ids = ids[max(0, len(ids) + new - 1 - model.context) :]
            (text,) = continuations(model, [ids], new)
            stops = options.get("until") or []
            for stop in [stops] if isinstance(stops, str) else stops:
                text = text.split(stop)[0] if stop else text
            return text

    return Instrumented()


def through_harness(model: Any, tasks: Sequence[str], n: int | None = None, batch: int = 8) -> pd.DataFrame:
    """Zero-shot results of lm-eval's own tasks, [task, metric, value, low, high, n]; intervals from its standard error.

    `tasks`: names of the suite or of lm-eval. Data come from a hub. Not resumable: lm-eval runs a task as one.
    """
    import pandas as pd

    lm = harness_lm(model, batch)
    from lm_eval.evaluator import simple_evaluate

    names = [NAMES.get(task, task) for task in tasks]
    found = simple_evaluate(lm, tasks=list(names), num_fewshot=0, limit=n, bootstrap_iters=1000)
    assert found is not None
    rows = []
    for task, results in found["results"].items():
        for name, value in results.items():
            metric, _, rule = name.partition(",")
            if not rule or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = results.get(f"{metric}_stderr,{rule}")
            half = 1.96 * error if isinstance(error, int | float) else float("nan")
            count = found["n-samples"].get(task, {}).get("effective")
            rows.append((task, metric, float(value), value - half, value + half, count))
    return pd.DataFrame(rows, columns=["task", "metric", "value", "low", "high", "n"])
