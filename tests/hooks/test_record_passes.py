"""What a recording takes for its samples: packed documents one by one, and a pass that gradients repeat once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_close, model_of, tokens_of
from softmax_families import build
from torch.utils.checkpoint import checkpoint

import hybridscope as hs
from hybridscope.hooks import record as recording
from hybridscope.hooks.adapters import transformers

HYBRID = ("swa:4", "gdn", "nope", "full")
IDS = torch.tensor([[0] * 6 + [1] * 4])


@pytest.mark.parametrize("ids", [IDS, torch.tensor([[0] * 5 + [1] * 5])], ids=["ragged", "even"])
@pytest.mark.parametrize("layer", [1, 3])
def test_labels_of_packed_documents_are_those_of_the_packed_tokens(ids: torch.Tensor, layer: int) -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 10)
    labels = torch.zeros(1, 10, 2, dtype=torch.bool)
    labels[0, 2, 0] = labels[0, 8, 1] = True
    with model.record(stats=hs.Stats(labels=labels, recurrent=True)) as rec:
        model(tokens, documents=ids)
    split = int((ids == 0).sum())
    for n, part in enumerate((slice(0, split), slice(split, 10))):
        with model.record(stats=hs.Stats(labels=labels[:, part], recurrent=True)) as alone:
            model(tokens[:, part])
        mass = rec.stats(layer).mass[n, : len(tokens[0, part])]
        assert_close(mass, alone.stats(layer).mass[0], "model")
        assert (mass[..., n] > 0).any()
        assert (mass[..., 1 - n] == 0).all()


def test_labels_may_be_those_of_each_document() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 10)
    second = torch.zeros(2, 6, dtype=torch.bool)
    second[1, 2] = True
    packed = torch.zeros(1, 10, dtype=torch.bool)
    packed[0, 8] = True
    masses = []
    for labels in (second, packed):
        with model.record(stats=hs.Stats(labels=labels)) as rec:
            model(tokens, documents=IDS)
        masses.append(rec.stats(3).mass)
    assert_close(*masses)
    with (
        model.record(stats=hs.Stats(labels=packed[:, :7])),
        pytest.raises(ValueError, match=r"labels: shape \(1, 7\); expected \(1, 10\), .* or \(2, 6\)"),
    ):
        model(tokens, documents=IDS)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_pass_that_checkpointing_repeats_is_recorded_once(reentrant: bool) -> None:
    model, tokens = model_of(*HYBRID).requires_grad_(), tokens_of(2, 9)
    for block in model.layers:
        forward = block.forward

        def again(*args: Any, forward: Any = forward) -> torch.Tensor:
            return checkpoint(forward, *args, use_reentrant=reentrant)

        block.forward = again
    with model.record(resid="last", stats=hs.Stats(rows=[-1], recurrent=True), states="last") as rec:
        loss = model(tokens).square().mean()
        loss.backward()
    assert rec.stats(3).entropy.shape == (2, 1, 4)
    assert rec.stats(1).entropy.shape == (2, 1, 4)
    assert rec.resid(1, "mid").shape[0] == 2
    assert rec.state(1).shape[:2] == (2, 1)
    assert model.layers[0].ln1.weight.grad is not None


def test_a_recording_inside_a_backward_pass_is_one() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(2, 9)
    x = torch.ones(2, requires_grad=True)
    seen = []

    def hook(_: torch.Tensor) -> None:
        with model.record(resid="last", stats=[-1]) as rec:
            model(tokens)
        seen.append((rec.stats(3).entropy.shape, rec.resid(3).shape))

    x.register_hook(hook)
    x.sum().backward()
    assert seen == [((2, 1, 4), (2, 1, 16))]


def test_so_it_is_in_transformers() -> None:
    model = transformers.load(build("llama"))
    model.model.activation_checkpointing_enable()
    model.train()
    tokens = torch.randint(3, 40, (2, 9))
    with model.record(stats=[-1]) as rec:
        model(tokens).square().mean().backward()
    assert rec.stats(1).entropy.shape[:2] == (2, 1)


@pytest.mark.parametrize("padded", [False, True])
def test_rows_and_labels_are_prepared_once_a_call(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every layer; of each call anew, with the labels as they were at first."""
    model = model_of("full", layers=3)
    made: list[str] = []

    def counted(name: str, make: Any) -> Any:
        return lambda *args: (made.append(name), make(*args))[1]

    for name in ("spread", "to_device"):
        monkeypatch.setattr(recording, name, counted(name, getattr(recording, name)))
    labels = torch.zeros(2, 9, dtype=torch.bool)
    labels[:, 3] = True
    mask = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
    parts = [tokens_of(2, 9, seed=seed) for seed in (0, 1)]
    with torch.no_grad(), model.record(stats=hs.Stats(rows=[5, -1], labels=labels)) as rec:
        labels[:, 4] = True
        for calls, tokens in enumerate(parts, 1):
            model(tokens, attention_mask=mask if padded else None)
            assert made.count("spread") <= calls
            assert made.count("to_device") <= 2 * calls
    labels[:, 4] = False
    for n, tokens in enumerate(parts):
        with model.record(stats=hs.Stats(rows=[5, -1], labels=labels)) as alone:
            model(tokens, attention_mask=mask if padded else None)
        for layer in range(3):
            assert torch.equal(rec.stats(layer).mass[2 * n : 2 * n + 2], alone.stats(layer).mass)


def test_rows_are_whole_numbers_and_labels_tensors() -> None:
    model, tokens = model_of(*HYBRID), tokens_of(1, 10)
    with model.record(stats=torch.tensor([1.5])), pytest.raises(ValueError, match=r"stats: rows: torch.float32"):
        model(tokens)
    with model.record(resid=[True]), pytest.raises(ValueError, match=r"resid: positions: torch.bool"):
        model(tokens)
    with pytest.raises(ValueError, match=r"labels: \(10,\); expected a bool or uint8 tensor \[B,T\]"):
        hs.Stats(labels=torch.ones(10, dtype=torch.bool))
