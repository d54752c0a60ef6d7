"""The benches, as far as a machine without a GPU shows: arithmetic, protocol, resuming, tables. No timings."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch

import hybridscope as hs
from hybridscope.experiments import cli
from hybridscope.experiments.bench import (
    attention_paths,
    cells,
    flops,
    parity_train,
    peers,
    step,
    tables,
    train,
    workers,
)
from hybridscope.experiments.loss import token_loss

CPU = torch.device("cpu")


# Arithmetic


def test_flops_of_full_attention_by_hand():
    model = hs.HybridLM(hs.HybridConfig(("full",), 2, 8, 2, 10, n_kv_heads=1, d_ff=12))
    projections = 8 * 8 + 2 * 8 * 4 + 8 * 8  # q; k and v of one head of 4; o
    n = 2 * (projections + 3 * 8 * 12) + 10 * 8  # the unembedding, not the embedding
    assert flops.matrix_elements(model) == n
    # 5 tokens see 1 + 2 + 3 + 4 + 5 keys, 3 on average; 2 operations a channel for scores and for values, 2 heads of 4.
    assert flops.flops_per_token(model, 5) == 6 * n + 3 * 2 * (2 * 2 * (4 + 4) * 3)
    assert flops.flops_per_token(model, 5, whole=True) == 6 * n + 3 * 2 * (2 * 2 * (4 + 4) * 5)


def test_flops_of_windows_and_states():
    model = hs.HybridLM(hs.HybridConfig(("swa:2", "gdn", "rwkv7", "hgrn2"), 4, 8, 2, 10, tie_embeddings=True))
    window, gdn, rwkv7, hgrn2 = model.sites
    assert flops.mixer_flops(window, 4) == 2 * 2 * (4 + 4) * (1 + 2 + 2 + 2) / 4
    assert flops.mixer_flops(window, 4, whole=True) == flops.mixer_flops(window, 4)
    assert flops.mixer_flops(window, 1) == 2 * 2 * (4 + 4)
    assert flops.mixer_flops(gdn, 4) == 6 * gdn.heads * gdn.key_dim * gdn.value_dim
    assert flops.mixer_flops(rwkv7, 4) == 8 * rwkv7.heads * rwkv7.key_dim * rwkv7.value_dim
    assert flops.mixer_flops(hgrn2, 4) == 4 * hgrn2.heads * hgrn2.key_dim * hgrn2.value_dim
    assert flops.matrix_elements(model) == sum(p.numel() for p in model.parameters() if p.ndim >= 2)


def test_nominal_peak():
    assert flops.nominal_peak("NVIDIA H200") == 989e12
    assert flops.nominal_peak("cpu") is None


@pytest.mark.parametrize("shape", [(2, 5), (1, 2)])
def test_token_loss_is_the_weighted_mean_cross_entropy(shape):
    B, T = shape
    logits = torch.randn(B, T, 7, dtype=torch.float64, requires_grad=True)
    tokens, weight = torch.randint(7, (B, T)), torch.rand(B, T - 1, dtype=torch.float64)
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    expected = (losses * weight.flatten()).sum() / weight.sum()
    got = token_loss(logits, tokens, weight)
    assert torch.allclose(got, expected, atol=1e-12)
    pair = [torch.autograd.grad(loss, logits)[0] for loss in (got, expected)]
    assert torch.allclose(*pair, atol=1e-12)
    assert torch.allclose(token_loss(logits, tokens, weight, weight.sum() * 2), expected / 2)
    assert token_loss(logits.bfloat16(), tokens, weight.float()).dtype == torch.float32


# Cells


def test_names_of_cells():
    cell = cells.Cell.of("340m/4096/gdn@3:1/blocks/plain-loss")
    assert (cell.size, cell.length, cell.pattern, cell.batch) == ("340m", 4096, "gdn@3:1", 8)
    assert cell.options == {"compile": "blocks", "loss": "plain", "attention": "auto"}
    assert cell.id == "340m/4096/gdn@3:1/blocks/plain-loss"
    assert cells.config_of(cell).layers[:4] == ("gdn", "gdn", "gdn", "full")
    assert cells.config_of(cells.Cell.of("15m/64/swa:512")).layers[:2] == ("swa:512", "full")
    assert set(cells.config_of(cells.Cell.of("15m/64/gdn@pure")).layers) == {"gdn"}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("huge/64/full", "known: 15m"),
        ("tiny/x/full", "length 'x'"),
        ("tiny", "length ''"),
        ("tiny/64/nothing", "unknown mixer 'nothing'"),
        ("tiny/64/full/fast", "tag 'fast'"),
    ],
)
def test_names_that_are_no_cells(name, named):
    with pytest.raises(ValueError, match=named):
        cells.Cell.of(name)


def test_the_plan_begins_with_what_is_wanted_most():
    names = [cell.id for cell in cells.plan()]
    assert names[:4] == ["340m/4096/full", "340m/4096/full/blocks", "340m/4096/gdn@pure/blocks", "340m/4096/fla-gdn"]
    assert len(names) == len(set(names))
    assert [cell.id for cell in cells.plan(["tiny"], [64, 32], ["full"])] == ["tiny/64/full", "tiny/32/full"]


def test_sizes_are_what_they_are_called():
    for size, count in (("15m", 15e6), ("100m", 104.4e6), ("340m", 341e6)):
        with torch.device("meta"):
            model = hs.HybridLM(cells.config_of(cells.Cell.of(f"{size}/64/full")))
        total = sum(p.numel() for p in model.parameters())
        tables_ = model.embed.weight.numel() * (1 if size == "340m" else 2)  # 340m: non-embedding and one table
        assert total - tables_ == pytest.approx(count, rel=0.01)


# The run


@pytest.fixture
def in_process(monkeypatch):
    """Workers run in this process; returns the names of the cells that each was given."""
    given = []

    def follow(arguments, keep, *, errors, patience, environment=None):
        out = io.StringIO()
        given.append(json.loads(arguments[arguments.index("--worker") + 1]))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            train.main(arguments[1:])
        for line in out.getvalue().splitlines():
            patience()
            keep(json.loads(line))
        return 0

    monkeypatch.setattr(workers, "follow", follow)
    return given


def options(*names: str, **more) -> train.Options:
    return train.Options([cells.Cell.of(f"tiny/16/{name}/uncompiled", tokens=32) for name in names], "cpu", **more)


def test_a_run_is_saved_compared_and_resumed(in_process, tmp_path):
    file = tmp_path / "train.json"
    result = train.bench(file, options("full", "gdn", seconds=0.01))
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    full, gdn = result["rows"]
    assert (full["status"], full["batch"], full["tokens_per_step"], full["steps"]) == ("ok", 2, 32, 3)
    assert full["vs_full"] == 1
    assert gdn["vs_full"] == gdn["tokens_per_second"] / full["tokens_per_second"]
    assert full["mfu"] is None
    assert full["peak_memory_gib"] is None
    assert full["parameters"] == full["parameters_ours"]
    assert full["loss_first"] == pytest.approx(torch.tensor(128.0).log().item(), abs=0.1)
    again = train.bench(file, options("full", "gdn", "llama", seconds=0.01))
    assert in_process[1:] == [["tiny/16/llama/uncompiled"]]
    assert [row["id"].split("/")[2] for row in again["rows"]] == ["full", "gdn", "llama"]
    assert again["rows"][0]["vs_peer"] is not None
    assert (
        again["rows"][0]["vs_peer_session"] == again["rows"][2]["session"]
        or again["rows"][2]["session"] == again["rows"][0]["session"]
    )
    text = tables.markdown(tables.load(file))
    assert "### tiny, T = 16" in text
    assert text.count("| `") == 3


def test_a_model_is_compared_with_the_full_one_that_is_compiled_as_it_is(in_process, tmp_path):
    """And a peer, which is compiled in its own way or not at all, with the fastest full one."""
    rows = train.bench(tmp_path / "t.json", options("full", "gdn", seconds=0.01))["rows"]
    full, gdn = ({**row, "status": "ok"} for row in rows)
    result = {"rows": [], "measured_peak": {}, "nominal_peak": None}
    for of, pattern, how, speed in (
        (full, "full", "model", 100.0), (full, "full", "blocks", 80.0), (full, "full", "none", 200.0),
        (gdn, "gdn", "blocks", 40.0), (gdn, "fla-gdn", "model", 50.0), (gdn, "gdn", "flash", 60.0),
    ):  # fmt: skip
        result["rows"].append({**of, "pattern": pattern, "compile": how, "tokens_per_second": speed})
    result["rows"] += [{**result["rows"][0], "loss": "plain", "tokens_per_second": 1e9}]  # no baseline for anything
    train.compare(result)
    assert [row["vs_full"] for row in result["rows"][:6]] == [1, 1, 1, 0.5, 0.25, 0.3]


def test_what_fails_is_recorded_and_the_rest_goes_on(in_process, tmp_path, monkeypatch):
    def refuse(*_):
        raise ImportError("no such library")

    monkeypatch.setattr(peers, "build", refuse)
    result = train.bench(tmp_path / "t.json", options("fla-gdn", "full", seconds=0.01))
    assert [row["status"] for row in result["rows"]] == ["failed", "ok"]
    assert "no such library" in tables.markdown(result)
    assert result["not_run"] == []


def test_a_worker_that_dies_costs_its_cell_alone(tmp_path, monkeypatch):
    calls = []

    def follow(arguments, keep, *, errors, patience, environment=None):
        names = json.loads(arguments[2])
        calls.append(names)
        keep({"peak": None})
        keep({"start": names[0]})
        errors.write_text("Segmentation fault")
        return "stopped" if len(calls) == 1 else -11

    monkeypatch.setattr(workers, "follow", follow)
    result = train.bench(tmp_path / "t.json", options("full", "gdn"))
    assert [len(names) for names in calls] == [2, 1]
    assert "no result within 240 s" in result["rows"][0]["exception"]
    assert "Segmentation fault" in result["rows"][1]["exception"]


def test_no_time_left(in_process, tmp_path):
    result = train.bench(tmp_path / "t.json", options("full", "gdn", budget=0.0))
    assert result["rows"] == []
    assert result["not_run"] == ["tiny/16/full/uncompiled", "tiny/16/gdn/uncompiled"]
    assert "Not run: 2 cells, tiny/16/full/uncompiled the first of them." in tables.markdown(result)


def test_a_loss_that_is_no_number_fails(monkeypatch):
    monkeypatch.setattr(step, "token_loss", lambda logits, *_, **__: logits.sum() * float("nan"))
    with pytest.raises(ArithmeticError, match="loss nan"):
        step.measure(cells.Cell.of("tiny/16/full/uncompiled", 32), CPU, warmup=1, seconds=0.0)


def test_workers_are_followed_and_stopped(tmp_path):
    seen = []
    errors = tmp_path / "errors"
    sleep = ["timeit", "-n1", "-r1", "print('{\"row\": 1}', flush=True); import time; time.sleep(60)"]
    left = iter([30.0, 0.1])
    code = workers.follow(sleep, seen.append, errors=errors, patience=lambda: next(left))
    assert (code, seen) == ("stopped", [{"row": 1}])
    assert workers.follow(["no_such_module"], seen.append, errors=errors, patience=lambda: 30.0) == 1
    assert "no_such_module" in workers.tail(errors)


# Parity


def test_judging_two_curves():
    falls = [4.0, 3.0, 2.0]
    assert parity_train.judge(falls, [4.0, 3.01, 2.0], "bf16")["ok"]
    apart = parity_train.judge(falls, [4.0, 3.2, 2.0], "bf16")
    assert apart["of_drop"] == pytest.approx(0.1)
    assert not apart["ok"]
    assert not parity_train.judge([4.0, 4.0], [4.0, 4.0], "bf16")["ok"]
    assert not parity_train.judge(falls, [4.0, float("nan"), 2.0], "bf16")["ok"]


def test_the_chain_is_learnable_and_repeats():
    chain = parity_train.Chain()
    x = chain.batch(3, 2, 40)
    assert torch.equal(x, parity_train.Chain().batch(3, 2, 40))
    assert not torch.equal(x, chain.batch(4, 2, 40))
    follows = [
        [x[b, t].item() in chain.tables[i, x[b, t - 1 - i]] for t in range(2, 40)] for b in (0, 1) for i in (0, 1)
    ]
    assert all(one or other for one, other in zip(follows[0], follows[1], strict=True))


def test_a_parity_row_without_kernels():
    row = parity_train.row("gdn", "bf16", CPU, steps=2, paths=("torch", "torch"), shape=(2, 16))
    assert row["torch_losses"] == row["fused_losses"]
    assert (row["status"], row["ok"], len(row["torch_losses"])) == ("ok", False, 2)  # two steps are too few to fall
    failed = parity_train.row("gdn", "bf16", CPU, steps=2, shape=(2, 16))
    assert "fused kernels need CUDA" in failed["exception"]
    result = {"bench": "parity_train", "device": "cpu", "versions": {}, "commit": None, "not_run": ["kda bf16"]}
    text = tables.markdown({**result, "rows": [row, failed]})
    assert "OVER" in text
    assert "Not run: kda bf16" in text


def test_attention_paths_on_a_cpu():
    assert attention_paths.seen(4, None) == 2.5
    assert attention_paths.seen(4, 2) == (1 + 2 + 2 + 2) / 4
    q, k, v = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    for window in (None, 3):
        expected = attention_paths.kernel.attention_reference(q=q, k=k, v=v, window=window)
        got = attention_paths._sdpa(q, k, v) if window is None else attention_paths._bands(q, k, v, window)
        assert torch.allclose(got, expected, atol=1e-5)
    row = {"B": 1, "T": 9, "H": 4, "G": 2, "K": 8, "window": 3, "path": "flash", "status": "ok", "forward_ms": 1.0}
    row |= {"both_ms": 3.0, "forward_flops_per_second": 1e12, "both_flops_per_second": 1e12, "errors": {"out": 0.01}}
    failed = {**row, "status": "failed", "exception": "RuntimeError: no"}
    assert "error 1.0e-02" in attention_paths.line_of(row)
    text = tables.markdown({"bench": "attention_paths", "device": "cpu", "versions": {}, "rows": [row, failed]})
    assert text.count("`flash`") == 2


# The command


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("what", ["train", "parity", "kernels"])
def test_the_command_says_what_is_missing(what, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", what, "--out", str(tmp_path / "r.json")])
    assert stop.value.code == 2
    assert "error: this bench needs a CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_prints_tables(in_process, capsys, tmp_path):
    file = tmp_path / "train.json"
    args = ["--sizes", "tiny", "--lengths", "16", "--patterns", "full/uncompiled", "--device", "cpu"]
    cli.main(["bench", "train", "--out", str(file), *args])
    assert "| `full` " in capsys.readouterr().out
    cli.main(["bench", "table", "--out", str(file)])
    assert "| `full` " in capsys.readouterr().out
    file.write_text("{}")
    for command in (["table"], ["train", "--device", "cpu"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", *command, "--out", str(file)])
