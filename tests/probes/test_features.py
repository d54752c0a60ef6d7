"""Features on disk: those that memory would hold, wherever the run was killed; nothing gets mixed up."""

from __future__ import annotations

import copy
import dataclasses
import json
import signal
import subprocess
import sys
import textwrap

import numpy as np
import planted
import pytest
import torch
from planted import LANGUAGE, T

import hybridscope as hs
from hybridscope.probes import features
from hybridscope.probes.features import extract

PLACES = [(layer, where) for layer in range(3) for where in ("pre", "mid", "post", "delta")]


@pytest.fixture(scope="module")
def model():
    return planted.planted()


@pytest.fixture(scope="module")
def prompts():
    return hs.make_needles(60, T, values=4, language=LANGUAGE)


@pytest.fixture
def every_batch(monkeypatch):
    monkeypatch.setattr(features, "SAVE_EVERY", 0.0)


def files(folder):
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir())}


def counted(model, monkeypatch, fail_at=None):
    """The sizes of the batches that go through the model; the one numbered `fail_at` is interrupted."""
    sizes, hidden = [], model.hidden

    def count(tokens, *rest):
        if len(sizes) == fail_at:
            raise KeyboardInterrupt
        sizes.append(len(tokens))
        return hidden(tokens, *rest)

    monkeypatch.setattr(model, "hidden", count)
    return sizes


def test_a_folder_holds_what_memory_would(model, prompts, tmp_path):
    held = extract(model, prompts, PLACES, batch=16)
    stored = extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    assert len(stored) == len(held) == 12
    assert all(np.array_equal(a, b) for a, b in zip(stored, held, strict=True))
    assert isinstance(stored[0], np.memmap)
    assert json.loads((tmp_path / "f" / "progress.json").read_text()) == {"samples": 60}


@pytest.mark.parametrize("fail_at", [0, 1, 3])
def test_an_interrupted_run_goes_on_where_it_stood(model, prompts, tmp_path, monkeypatch, every_batch, fail_at):
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "whole")
    with monkeypatch.context() as patch:
        counted(model, patch, fail_at)
        with pytest.raises(KeyboardInterrupt):
            extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    left = counted(model, monkeypatch)
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    assert left == [16, 16, 16, 12][fail_at:]
    assert files(tmp_path / "f") == files(tmp_path / "whole")


def test_what_was_written_after_the_last_progress_is_written_again(model, prompts, tmp_path, monkeypatch):
    """A kill between arrays and progress, and one before any progress."""
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "whole")
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    (tmp_path / "f" / "progress.json").write_text('{"samples": 32}')
    for file in (tmp_path / "f").glob("*.npy"):
        array = np.load(file, mmap_mode="r+")
        array[32:] = np.nan
        array.flush()
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    assert np.array_equal(np.load(tmp_path / "f" / "001-mid.npy"), np.load(tmp_path / "whole" / "001-mid.npy"))
    (tmp_path / "f" / "progress.json").unlink()
    sizes = counted(model, monkeypatch)
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    assert sum(sizes) == 60


def test_a_killed_process_goes_on_where_it_stood(model, prompts, tmp_path):
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(planted.__file__.rsplit("/", 1)[0])!r})
        import planted, hybridscope as hs
        from hybridscope.probes import features
        features.SAVE_EVERY = 0.0
        model, seen = planted.planted(), []
        hidden = model.hidden
        def killed(tokens, *rest):
            seen.append(tokens)
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return hidden(tokens, *rest)
        model.hidden = killed
        prompts = hs.make_needles(60, planted.T, values=4, language=planted.LANGUAGE)
        places = [(layer, where) for layer in range(3) for where in ("pre", "mid", "post", "delta")]
        features.extract(model, prompts, places, batch=16, folder={str(tmp_path / "f")!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert json.loads((tmp_path / "f" / "progress.json").read_text()) == {"samples": 32}
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "f")
    extract(model, prompts, PLACES, batch=16, folder=tmp_path / "whole")
    assert files(tmp_path / "f") == files(tmp_path / "whole")


def test_finished_features_are_read_and_not_made_again(model, prompts, tmp_path, monkeypatch):
    options = {"where": ("pre", "mid"), "seeds": 1, "features_dir": tmp_path}
    value = hs.probe_layers(model, prompts, "value", **options)
    sizes = counted(model, monkeypatch)
    again = hs.probe_layers(model, prompts, "value", **options)
    plain = hs.probe_layers(model, prompts, "value", where=("pre", "mid"), seeds=1)
    assert len(sizes) == 4  # of the plain one alone: 32 and 28 prompts, with needle and without
    assert again.equals(value)
    assert plain.equals(value)
    other = dataclasses.replace(prompts, labels={**prompts.labels, "depth": prompts.labels["depth"] // 5})
    assert set(hs.probe_layers(model, other, "depth", **options)["target"]) == {"depth"}
    assert len(sizes) == 4


def test_features_of_something_else_are_refused(model, prompts, tmp_path):
    def again(model=model, prompts=prompts, places=PLACES, **options):
        return extract(model, prompts, places, folder=tmp_path / "f", **options)

    again()
    other = planted.planted({0: 1.0})
    with pytest.raises(ValueError, match=r"another run \(model differ\)"):
        again(other)
    with model.cap(full=4), pytest.raises(ValueError, match=r"\(model differ\)"):
        again()
    nearly = copy.deepcopy(model)
    with torch.no_grad():
        max(nearly.parameters(), key=torch.numel).view(-1)[1] += 1e-3
    with pytest.raises(ValueError, match=r"\(model differ\)"):
        again(nearly)
    with pytest.raises(ValueError, match=r"\(prompts differ\)"):
        again(prompts=hs.make_needles(60, T, values=4, language=LANGUAGE, seed=1))
    with pytest.raises(ValueError, match=r"\(prompts, samples differ\)"):
        again(prompts=prompts[:50])
    with pytest.raises(ValueError, match=r"\(prompts differ\)"):
        again(removed=True)
    with pytest.raises(ValueError, match=r"\(prompts differ\)"):
        again(position=prompts.query_row - 1)
    with pytest.raises(ValueError, match=r"\(places differ\)"):
        again(places=PLACES[1:])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="holds something else"):
        extract(model, prompts, PLACES, folder=tmp_path / "mine")


def test_the_same_weights_in_another_model_have_other_features(tmp_path):
    """Windows and rotary bases are in no weight."""
    prompts = hs.make_needles(20, T, values=4, language=LANGUAGE)

    def model(mixer, **options):
        torch.manual_seed(0)
        return hs.HybridLM(hs.HybridConfig([mixer, "full"], 2, 16, 2, LANGUAGE.vocab_size, **options)).eval()

    extract(model("swa:4"), prompts, [(1, "post")], folder=tmp_path / "f")
    for other in (model("swa:8"), model("swa:4", rope_base=500.0)):
        with pytest.raises(ValueError, match=r"\(model differ\)"):
            extract(other, prompts, [(1, "post")], folder=tmp_path / "f")


def test_features_without_some_heads_are_not_taken_for_those_without_others(model, prompts, tmp_path):
    with model.ablate([(1, 0)]):
        extract(model, prompts, PLACES[-1:], folder=tmp_path / "f")
    with model.ablate([(1, 1)]), pytest.raises(ValueError, match="ablations, edits and knockouts have no name"):
        extract(model, prompts, PLACES[-1:], folder=tmp_path / "f")
    with pytest.raises(ValueError, match=r"\(model differ\)"):
        extract(model, prompts, PLACES[-1:], folder=tmp_path / "f")


def test_memory_holds_one_batch(tmp_path):
    """Peak resident memory of a run over 8,192 samples grows by far less than their features, 200 MB."""
    code = f"""
        import contextlib, resource, torch, hybridscope as hs
        from hybridscope.probes.features import extract
        class Model:
            sites = ()
            def parameters(self):
                return iter([torch.zeros(1)])
            @contextlib.contextmanager
            def record(self, resid):
                yield self
            def hidden(self, tokens, mask):
                self.n = len(tokens)
            def resid(self, layer, where):
                return torch.ones(self.n, 1, 256)
        places = [(l, w) for l in range(6) for w in ("pre", "mid", "post", "delta")]
        made = hs.make_needles(64, 24, values=4, language=hs.TokenLanguage(vocab_size=48, keys=8, values=8))
        extract(Model(), made, places, folder={str(tmp_path / "few")!r})
        many = made[torch.arange(64).repeat(128)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        extract(Model(), many, places, folder={str(tmp_path / "many")!r})
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 0.1 * 24 * 8192 * 256 * 4


def test_left_padded_prompts_are_read_at_their_own_last_token(model, prompts):
    """A shorter prompt beside a longer one, and alone."""
    short = prompts.tokens[:, 8:]
    padded = dataclasses.replace(
        prompts, tokens=torch.cat([torch.zeros(60, 8, dtype=torch.int64), short], 1),
        attention_mask=torch.cat([torch.zeros(60, 8, dtype=torch.bool), torch.ones_like(short, dtype=torch.bool)], 1),
    )  # fmt: skip
    alone = dataclasses.replace(prompts, tokens=short, answer_rows=prompts.answer_rows - 8)
    got, expected = extract(model, padded, PLACES), extract(model, alone, PLACES)
    assert np.abs(got - expected).max() < 1e-5
    position = padded.query_row.clone()
    position[3] = 7
    with pytest.raises(ValueError, match="position: column 7 of prompt 3 is padding"):
        extract(model, padded, PLACES, position=position)
