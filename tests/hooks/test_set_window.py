"""HybridLM.set_window: the model becomes the one that its pattern would have made with that window."""

from __future__ import annotations

import pytest
import torch

import hybridscope as hs


def made(window: int) -> hs.HybridLM:
    torch.manual_seed(0)
    return hs.HybridLM(hs.HybridConfig((f"swa:{window}", "full"), 4, 16, 2, 30))


def test_it_is_the_model_of_that_window(tmp_path):
    model, expected = made(3), made(9)
    before = model.config
    model.set_window(9)
    tokens = torch.randint(30, (2, 20))
    assert torch.equal(model(tokens), expected(tokens))
    assert not torch.equal(model(tokens), made(3)(tokens))
    assert [(s.mixer, s.window) for s in model.sites] == [("swa:9", 9), ("full", None)] * 2
    assert model.config.layers == ("swa:9", "full") * 2
    assert before.layers == ("swa:3", "full") * 2  # another model may share it
    model.save(tmp_path / "model")
    assert torch.equal(hs.load(tmp_path / "model")(tokens), expected(tokens))


@pytest.mark.parametrize("layer", ["swa:{}|gdn", "full+swa:{}"])
def test_a_window_among_parallel_mixers_is_set_too(layer):
    model, expected = (hs.HybridLM(hs.HybridConfig([layer.format(w)], 1, 16, 2, 30)) for w in (3, 9))
    expected.load_state_dict(model.state_dict())
    model.set_window(9)
    tokens = torch.randint(30, (2, 20))
    assert torch.equal(model(tokens), expected(tokens))
    assert repr(model.sites) == repr(expected.sites)
    assert model.config.to_dict() == expected.config.to_dict()


def test_a_model_without_windows_has_none_to_set():
    with pytest.raises(ValueError, match="window=4: no swa site to set it on; layers gdn, full"):
        hs.HybridLM(hs.HybridConfig(("gdn", "full"), 2, 16, 2, 30)).set_window(4)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_changes_nothing(window):
    model = made(3)
    with pytest.raises(ValueError, match="must be >= 1"):
        model.set_window(window)
    assert model.sites[0].window == 3
    assert model.config.layers[0] == "swa:3"
