"""Gradient influence: the right derivative, at the right distance, and the model left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Largest, assert_close, model_of, tokens_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hybridscope as hs
from hybridscope.hooks.instrumented import Instrumented
from hybridscope.hooks.sites import Sites
from hybridscope.probes import influence
from hybridscope.probes.influence import gradient_influence


@torch.no_grad()
def differences(model, tokens: Tensor, value, size: float = 1e-5) -> Tensor:
    """|| d value(logits [T,vocab]) / d embedding_i ||_2 for every i, by central differences; tokens [1,T]."""
    table = model.embedding()
    original = table(tokens)

    def at(embeddings: Tensor) -> float:
        handle = table.register_forward_hook(lambda *_: embeddings)
        try:
            return float(value(model(tokens)[0]))
        finally:
            handle.remove()

    gradient = torch.zeros_like(original)
    for index in torch.cartesian_prod(*map(torch.arange, original.shape)):
        step = torch.zeros_like(original)
        step[tuple(index)] = size
        gradient[tuple(index)] = (at(original + step) - at(original - step)) / (2 * size)
    return gradient[0].norm(dim=-1)


def loss_at(row: int, tokens: Tensor):
    return lambda logits: -logits[row].log_softmax(-1)[tokens[0, row + 1]]


@pytest.fixture
def model():
    return model_of("full", "swa:3", "gdn", d_model=8, heads=2)


def test_loss_matches_finite_differences(model):
    tokens = tokens_of(1, 9)
    table = gradient_influence(model, tokens, rows=[5])
    assert list(table.columns) == ["target", "distance", "influence", "low", "high", "n", "mixed"]
    assert list(table.distance) == [0, 1, 2, 3, 4, 5]  # later tokens cannot matter
    expected = differences(model, tokens, loss_at(5, tokens))
    assert torch.allclose(torch.tensor(table.influence), expected[:6].flip(0), rtol=1e-6)
    assert expected[6:].abs().max() == 0


@pytest.mark.parametrize("target", ["logit_sum", "argmax_logit"])
def test_published_targets_match_finite_differences(model, target):
    tokens = tokens_of(1, 22)
    table = gradient_influence(model, tokens, target)

    def value(logits: Tensor) -> Tensor:
        rows = logits[-20:]
        return (rows.sum(-1) if target == "logit_sum" else rows.max(-1).values).mean()

    expected = differences(model, tokens, value)
    assert torch.allclose(torch.tensor(table.influence), expected.flip(0), rtol=1e-5)
    assert list(table.mixed) == [True] * 20 + [False] * 2


def test_rows_and_documents_are_averaged_at_their_own_distance(model):
    tokens = tokens_of(2, 12)
    table = gradient_influence(model, tokens, rows=[4, -2])
    alone = [gradient_influence(model, tokens[b : b + 1], rows=[r]).influence for b in (0, 1) for r in (4, 10)]
    assert list(table.n) == [4] * 5 + [2] * 6
    assert table.influence[3] == pytest.approx(sum(a[3] for a in alone) / 4)
    assert table.influence[9] == pytest.approx((alone[1][9] + alone[3][9]) / 2)
    assert not table.mixed.any()


def test_default_rows_lie_in_the_last_quarter(model):
    table = gradient_influence(model, tokens_of(1, 41))
    assert table.distance.max() == 39  # the last row that has a target
    assert table.n.max() == 4
    assert (table.n[:30] == 4).all()


def test_nothing_comes_from_beyond_the_reach():
    model = model_of("swa:4", "swa:3")
    tokens = tokens_of(2, 30)
    assert model.reach() == 6
    inside = gradient_influence(model, tokens).set_index("distance").influence
    assert (inside[:6] > 0).all()
    assert (inside[6:] == 0).all()


def test_caps_bound_it_too():
    model = model_of("full", "gdn")
    tokens = tokens_of(1, 30)
    assert (gradient_influence(model, tokens).influence > 0).all()
    with model.cap(full=3, recurrent=5):
        capped = gradient_influence(model, tokens).influence
        assert model.reach() == 7
    assert (capped[:7] > 0).all()
    assert (capped[7:] == 0).all()


def test_bins_are_means_over_every_norm_in_them(model):
    tokens = tokens_of(2, 40)
    plain = gradient_influence(model, tokens, rows=[20, 38])
    binned = gradient_influence(model, tokens, rows=[20, 38], bins=[0, 1, 16, 39])
    assert list(binned.n) == [4, 60, 2 * (5 + 39 - 16)]
    inside = plain[16:]
    assert binned.influence[2] == pytest.approx((inside.influence * inside.n).sum() / inside.n.sum())
    assert binned.distance_low[2] <= binned.distance[2] < binned.distance_high[2]
    logarithmic = gradient_influence(model, tokens, rows=[20, 38], bins=5)
    assert logarithmic.n.sum() == plain.n.sum()
    assert (logarithmic.distance_high[:-1].to_numpy() == logarithmic.distance_low[1:].to_numpy()).all()


def test_intervals_are_over_documents(model):
    """The sampling spread of the mean of documents, whatever the number of rows and tokens in them."""
    tokens = tokens_of(12, 24)
    table = gradient_influence(model, tokens, rows=[15, 20], bins=[0, 1, 4, 16])
    alone = [gradient_influence(model, t[None], rows=[15, 20], bins=[0, 1, 4, 16]) for t in tokens]
    means = torch.tensor([list(a.influence) for a in alone], dtype=torch.float64)
    assert torch.allclose(means.mean(0), torch.tensor(table.influence))
    error = means.std(0, correction=0) / 12**0.5
    width = torch.tensor((table.high - table.low).to_numpy()) / (2 * 1.96)
    assert torch.allclose(width, error, rtol=0.2)
    assert ((table.low <= table.influence) & (table.influence <= table.high)).all()
    assert all(a.low.isna().all() for a in alone)  # one document says nothing about others
    same = gradient_influence(model, tokens[:1].expand(3, -1))
    assert torch.allclose(torch.tensor(same.low), torch.tensor(same.high))


def test_no_tensor_holds_tokens_by_tokens():
    """Fused attention and its backward, under windows, caps with sinks and recurrences too."""
    model, T = model_of("full", "swa:7", "gdn", d_model=8, heads=1), 1500
    with Largest() as largest, model.cap(full=40, sinks=2):
        gradient_influence(model, tokens_of(1, T), rows=[-2])
    assert 0 < largest.elements < T * T / 4
    with Largest() as largest:
        gradient_influence(model, tokens_of(1, T), "argmax_logit", bins=8)
    assert 0 < largest.elements < T * T / 4


def test_the_model_is_left_as_it_was(model):
    model.requires_grad_(True)
    model.embed.weight.requires_grad_(False)
    model.train()
    model.blocks[1].eval()
    before = ([p.requires_grad for p in model.parameters()], [m.training for m in model.modules()])
    with torch.no_grad():
        gradient_influence(model, tokens_of(1, 12))
        with pytest.raises(ValueError, match="vocabulary"):  # in the middle of a pass
            gradient_influence(model, tokens_of(1, 12) + 1000)
    assert before == ([p.requires_grad for p in model.parameters()], [m.training for m in model.modules()])
    assert all(p.grad is None for p in model.parameters())
    assert not model.embed._forward_hooks


def test_recomputing_layers_changes_nothing_but_memory(model):
    tokens = tokens_of(1, 30)
    kept: list[int] = []

    def run(recompute: bool):
        total = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal total
            total += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), model.cap(full=5):
            table = gradient_influence(model, tokens, recompute=recompute)
        kept.append(total)
        return torch.tensor(table.influence)

    assert_close(run(True), run(False))
    assert kept[0] < kept[1] / 3
    small, large = (hs.gradient_influence(model, tokens, budget=budget).influence for budget in (0, 8))
    assert small.tolist() == pytest.approx(large.tolist())
    assert "forward" not in vars(model.blocks[0])
    with model.record(resid="last"), pytest.raises(ValueError, match="record"):
        gradient_influence(model, tokens, recompute=True)


def test_layers_are_recomputed_where_a_document_would_keep_more_than_the_budget(model, monkeypatch):
    used = []
    monkeypatch.setattr(influence, "checkpoint", lambda f, *a, **o: used.append(1) or checkpoint(f, *a, **o))
    tokens = tokens_of(1, 400)
    gradient_influence(model, tokens, rows=[300])
    assert not used
    gradient_influence(model, tokens, rows=[300], budget=1e-6)
    assert len(used) == 3
    # What is measured on the first tokens is what the document keeps.
    kept = influence._kept(model, tokens, [300])
    assert kept == pytest.approx(influence._kept(model, tokens[:, :256], [300]) * 400 / 256, rel=0.01)
    with model.record(resid="last"):  # where layers cannot run twice, None keeps everything
        gradient_influence(model, tokens, rows=[300], budget=1e-6)
    assert len(used) == 3


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    widths = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=41, attention_dropout=0.5, **widths)).double()


class Foreign(Instrumented, nn.Module):
    """A transformers model behind the bare interface, with its own attention, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = llama()
        self.sites = Sites()

    def hidden(self, tokens, attention_mask=None, cache=None):
        return self.inner.model(input_ids=tokens, use_cache=False).last_hidden_state

    def unembed_hidden(self, hidden):
        return self.inner.lm_head(hidden)

    def embedding(self):
        return self.inner.get_input_embeddings()

    def forward(self, tokens):
        return self.unembed_hidden(self.hidden(tokens))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", [Foreign, lambda: hs.load(llama())])
def test_works_on_transformers_models_without_their_dropout(make, recompute):
    model, tokens = make(), tokens_of(1, 8)
    model.train()
    table = gradient_influence(model, tokens, rows=[6], recompute=recompute)
    assert all(m.training for m in model.modules())
    # Its norms compute in fp32 whatever the weights are, so the differences are coarse.
    expected = differences(model.eval(), tokens, loss_at(6, tokens), size=1e-3)
    assert torch.allclose(torch.tensor(table.influence), expected[:7].flip(0), rtol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "logits"}, "target"),
        ({"rows": [12]}, "does not fit"),
        ({"rows": [-13]}, "does not fit"),
        ({"rows": []}, "at least one"),
        ({"rows": [11]}, "no next token"),
        ({"rows": [-1]}, "no next token"),
        ({"target": "logit_sum"}, "last 20"),
        ({"bins": 0}, "bins"),
        ({"bins": [3, 3]}, "bins"),
        ({"bins": [100, 200]}, "bins"),
    ],
)
def test_mistakes_are_named(model, options, message):
    with pytest.raises(ValueError, match=message):
        gradient_influence(model, tokens_of(1, 12), **options)


def test_a_compiled_model_is_refused(model):
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match="compile"):
        gradient_influence(model, tokens_of(1, 12))


def test_the_last_row_is_fine_for_logits(model):
    table = gradient_influence(model, tokens_of(1, 12), "argmax_logit", rows=[-1])
    assert not table.mixed.any()
    assert len(table) == 12
