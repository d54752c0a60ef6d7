"""Sites, and the rules of every switch: restored whatever happens, one thread, copies apart, not compiled."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import model_of, tokens_of

from hybridscope import HybridLM

HYBRID = ("swa:4", "gdn", "nope", "full")
T = 12
TESTS = Path(__file__).parents[1]

Switch = Callable[[HybridLM], AbstractContextManager[Any]]
SWITCHES: dict[str, Switch] = {
    "cap": lambda m: m.cap(full=3, window=2, recurrent=5),
    "record": lambda m: m.record(resid="last", stats=[-1]),
    "ablate": lambda m: m.ablate([(0, 1), (1, 2), (3, 0)]),
    "knockout": lambda m: m.knockout(rows=[9, 11], keys=[8, 2]),
}
each_switch = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())


@pytest.fixture(name="model")
def _model() -> HybridLM:
    return model_of(*HYBRID, n_kv_heads=2)


def test_sites_say_what_each_mixer_is(model: HybridLM) -> None:
    sites = model.sites
    assert [s.layer for s in sites] == [0, 1, 2, 3]
    assert [s.kind for s in sites] == ["window", "recurrent", "full", "full"]
    assert [s.mixer for s in sites] == list(HYBRID)
    assert [s.window for s in sites] == [4, None, None, None]
    assert [s.rope for s in sites] == [True, False, False, True]
    assert [s.conv for s in sites] == [1, 4, 1, 1]
    assert [(s.heads, s.kv_heads, s.key_dim, s.value_dim) for s in sites] == [
        (4, 2, 4, 4),
        (4, 4, 4, 8),
    ] + 2 * [(4, 2, 4, 4)]
    assert [model.get_submodule(s.name).site is s for s in sites] == [True] * 4


def test_sites_print_as_a_table(model: HybridLM) -> None:
    lines = repr(model.sites).splitlines()
    assert len(lines) == 5
    assert lines[0].split()[:5] == ["layer", "index", "name", "kind", "mixer"]
    assert lines[1].split()[2:5] == ["blocks.0.attn", "window", "swa:4"]


def test_heads_are_named_by_layer_or_site(model: HybridLM) -> None:
    assert model.sites.head((3, 2)) == (model.sites[3], 2)
    assert model.sites.head((3, 0, 2)) == (model.sites[3], 2)
    for head, message in (
        ((3, 4), "heads 0..3"),
        ((3, -1), "heads 0..3"),
        ((4, 0), "layer 4 does not exist"),
        ((1,), "expected"),
    ):
        with pytest.raises(ValueError, match=message):
            model.sites.head(head)


def test_a_head_of_parallel_sites_names_its_site() -> None:
    sites = model_of("swa:3|gdn", "full").sites
    assert sites.head((0, 1, 1)) == (sites[1], 1)
    assert sites.head((1, 1)) == (sites[2], 1)
    with pytest.raises(ValueError, match=r"layer 0 has 2 sites; expected \(layer, site, head\)"):
        sites.head((0, 1))
    with pytest.raises(ValueError, match=r"layer 0 site 2 does not exist; it has sites 0\.\.1"):
        sites.head((0, 2, 1))


# Restored whatever happens


@each_switch
def test_switches_restore(model: HybridLM, switch: Switch) -> None:
    tokens = tokens_of(2, T)
    free = model(tokens)
    with switch(model):
        inside = model(tokens)
        assert any(site.active for site in model.sites)
    assert not any(site.active for site in model.sites)
    assert model.recorders == ()
    assert torch.equal(model(tokens), free)
    if switch is not SWITCHES["record"]:
        assert not torch.equal(inside, free)


@each_switch
def test_switches_restore_after_an_exception(model: HybridLM, switch: Switch) -> None:
    tokens = tokens_of(2, T)
    free = model(tokens)
    with pytest.raises(KeyError, match="mine"), model.cap(full=8), switch(model):
        raise KeyError("mine")
    with pytest.raises(ValueError, match="outside the vocabulary"), switch(model):
        model(tokens + 1000)
    assert not any(site.active for site in model.sites)
    assert model.recorders == ()
    assert torch.equal(model(tokens), free)


def test_switches_combine_and_unwind_in_order(model: HybridLM) -> None:
    """All four at once, entered in any order, equal each other; leaving one leaves the rest."""
    tokens, outs = tokens_of(2, T), []
    for order in (list(SWITCHES.values()), list(SWITCHES.values())[::-1]):
        with order[0](model), order[1](model), order[2](model):
            three = model(tokens)
            with order[3](model):
                outs.append(model(tokens))
            assert torch.equal(model(tokens), three)
    assert torch.equal(*outs)


@each_switch
def test_a_context_manager_is_a_plan_until_entered(model: HybridLM, switch: Switch) -> None:
    plan = switch(model)
    assert not any(site.active for site in model.sites)
    with plan:
        assert any(site.active for site in model.sites)


# One thread at a time


def in_thread(work: Callable[[], Any]) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


@each_switch
def test_a_second_thread_is_refused(model: HybridLM, switch: Switch) -> None:
    def enter(target: HybridLM) -> None:
        with switch(target):
            pass

    with model.cap(full=5):
        error = in_thread(lambda: enter(model))
        assert isinstance(error, RuntimeError)
        assert "another thread" in str(error)
        assert [s.cap for s in model.sites] == [None, None, 5, 5]  # the first one's switches stand
        assert in_thread(lambda: enter(copy.deepcopy(model))) is None  # a copy is free
        with switch(model):  # and so is the first thread
            pass
    assert in_thread(lambda: enter(model)) is None  # nobody is inside any more


# Copies


@each_switch
def test_a_copy_made_inside_is_off_and_independent(model: HybridLM, switch: Switch) -> None:
    tokens = tokens_of(2, T)
    free = model(tokens)
    with switch(model):
        inside = model(tokens)
        twin = copy.deepcopy(model)
        assert not any(site.active for site in twin.sites)
        assert twin.recorders == ()
        assert torch.equal(twin(tokens), free)
        with twin.cap(full=4), twin.ablate([(0, 0)]):
            assert torch.equal(model(tokens), inside)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(tokens), free)
    with twin.cap(full=2):
        assert torch.equal(model(tokens), free)
    twin.embed.weight.add_(1)
    assert torch.equal(model(tokens), free)
    assert not torch.equal(twin(tokens), free)


def test_hooks_of_a_copy_are_its_own(model: HybridLM) -> None:
    twin, fired = copy.deepcopy(model), []
    twin.run_with_hooks(tokens_of(1, T), fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: fired.append(1))])
    assert fired == [1]
    model(tokens_of(1, T))
    assert fired == [1]


# Compiled models


COMPILED = """
import torch
from helpers import assert_close, model_of, tokens_of

torch.set_num_threads(1)
model, tokens = model_of("swa:4", "gdn", "nope", "full"), tokens_of(2, 12)
switches = {
    "cap": lambda: model.cap(full=3, window=2, recurrent=5),
    "resid": lambda: model.record(resid="last"),
    "stats": lambda: model.record(stats=[-1]),
    "ablate": lambda: model.ablate([(0, 1), (1, 2)]),
    "knockout": lambda: model.knockout(rows=[9], keys=[8]),
    "hooks": lambda: model.hooks(fwd_hooks=[("hook_embed", lambda x, hook: 2 * x)]),
}
for first in (True, False):  # switched on before the first call, or after one
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    for name, switch in switches.items():
        if not first:
            assert_close(compiled(tokens), model(tokens), "model")
        with switch():
            try:
                compiled(tokens)
            except RuntimeError as error:
                assert "uncompiled" in str(error), error
            else:
                raise AssertionError(f"{name}: a compiled model ran with it on")
    assert_close(compiled(tokens), model(tokens), "model")  # all off again: it runs
"""


def test_a_compiled_model_refuses_switches_and_hooks() -> None:
    """In a process of its own: the type checks of this one are not made for tracing."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@each_switch
def test_a_model_compiled_in_place_refuses_at_the_door(model: HybridLM, switch: Switch) -> None:
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match="uncompiled"), switch(model):
        pass
    for run in (lambda: model.run_with_cache(tokens_of(1, T)), lambda: model.run_with_hooks(tokens_of(1, T))):
        with pytest.raises(RuntimeError, match="uncompiled"):
            run()
    assert not any(site.active for site in model.sites)
    twin = copy.deepcopy(model)  # a copy is not compiled
    with switch(twin):
        twin(tokens_of(1, T))
