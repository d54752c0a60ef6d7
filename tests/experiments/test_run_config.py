"""Run configs: every mistake is an error that names the key, what came and what was expected."""

from __future__ import annotations

import pytest
import tiny

from hybridscope.experiments.config import CONFIGS, load_config
from hybridscope.experiments.sweeps import is_sweep


@pytest.fixture
def load(tmp_path):
    def load(text=tiny.TOML, *overrides):
        file = tmp_path / "run.toml"
        file.write_text(text)
        return load_config(file, overrides)

    return load


def test_a_file_is_read_and_defaults_are_filled_in(load):
    run = load()
    assert run.model.pattern == ["swa:4", "full"]
    assert run.model.rope_base == 500_000.0
    assert run.data.copy_share == 0.5
    assert run.train.lr == 0.01
    assert run.train.clip == 1.0


def test_the_model_takes_vocabulary_and_context_from_the_data(load):
    hybrid = load().hybrid()
    assert (hybrid.vocab_size, hybrid.context) == (24, 32)
    assert hybrid.layers == ("swa:4", "full")
    longer = load(tiny.TOML, "model.n_layers=5").hybrid()
    assert longer.layers == ("swa:4", "full", "swa:4", "full", "swa:4")  # a list in TOML tiles


@pytest.mark.parametrize("path", [p for p in sorted(CONFIGS.glob("*.toml")) if not is_sweep(p)], ids=lambda p: p.stem)
def test_every_packaged_config_is_valid_and_found_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / path.stem).mkdir()  # a folder of that name does not hide it
    assert load_config(path.stem) == load_config(path)
    load_config(path.stem).hybrid()


def test_the_resolved_config_reads_back(load):
    from hybridscope.experiments.config import RunConfig, read

    run = load(tiny.TOML, "train.seed=3")
    assert read(RunConfig, {s: {k: v for k, v in d.items() if v is not None} for s, d in run.to_dict().items()}) == run


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.lr=3", "train", "lr", 3.0),
        ("train.lr=1e-4", "train", "lr", 1e-4),
        ("train.seed=7", "train", "seed", 7),
        ("train.device=cpu", "train", "device", "cpu"),
        ('train.device="cpu"', "train", "device", "cpu"),
        ("model.qk_norm=true", "model", "qk_norm", True),
        ('model.pattern=["gdn", "full"]', "model", "pattern", ["gdn", "full"]),
        ("model.mixers.gdn.conv=2", "model", "mixers", {"gdn": {"conv": 2}}),
        (" train.batch = 16", "train", "batch", 16),
    ],
)
def test_overrides(load, override, section, key, value):
    run = load(tiny.TOML, override)
    got = getattr(getattr(run, section), key)
    assert got == value
    assert type(got) is type(value)


def test_the_last_override_wins(load):
    assert load(tiny.TOML, "train.seed=1", "train.seed=2").train.seed == 2


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.stps=3", r"unknown key 'train.stps'; the nearest valid key is 'train.steps'"),
        ("model.heads=3", r"unknown key 'model.heads'; the nearest valid key is 'model.n_heads'"),
        ("modle.n_heads=3", r"unknown key 'modle'; the nearest valid key is 'model'"),
        ("x=1", r"unknown key 'x'; the nearest valid key is '(model|data|train)'"),
        ("train.steps", "expected a.b=value"),
        ("train.steps.more=1", "'steps' is a value, not a section"),
        ("train=5", r"train=5; expected a section \[train\]"),
        ("train.steps=ten", "train.steps='ten'; expected int"),
        ("train.steps=1.5", "train.steps=1.5; expected int"),
        ("train.steps=true", "train.steps=True; expected int"),
        ("train.lr=true", "train.lr=True; expected float"),
        ("train.lr=fast", "train.lr='fast'; expected float"),
        ("train.threads=two", r"train.threads='two'; expected int \| None"),
        ("model.qk_norm=1", "model.qk_norm=1; expected bool"),
        ("model.pattern=full", r"model.pattern='full'; expected list\[str\]"),
        ("model.pattern=[1, 2]", r"model.pattern=\[1, 2\]; expected list\[str\]"),
        ("model.mixers={gdn=4}", r"model.mixers=.*; expected dict\[str, dict\[str, Any\]\]"),
        ("data.file=3", "data.file=3; expected str"),
        ("train.steps=0", "train.steps=0: expected >= 1"),
        ("train.threads=0", "train.threads=0: expected >= 1"),
        ("train.accumulate=3", "train.accumulate=3 must divide train.batch=8"),
        ("train.saves=13", "train.saves=13: more than train.steps=12"),
        ("train.compile=maybe", "train.compile='maybe'"),
        ("train.muon_lr=0.1", 'train.muon_lr=0.1: only train.optimizer="muon" takes it'),
        ("data.copy_share=1.5", "data.copy_share=1.5"),
        ("data.needles=-1", "data.needles=-1"),
        ("data.filler_weight=nan", "data.filler_weight=nan: expected a finite number >= 0"),
        *(
            (f"train.{f}={v}", rf"train\.{f}={v}(\.0)?: expected a finite number >= 0")
            for f in ("lr", "weight_decay")
            for v in ("-1", "inf", "nan")
        ),
        ("train.warmup=-5", "train.warmup=-5: expected a finite number >= 0"),
        *((f"train.clip={v}", rf"train\.clip={v}(\.0)?: expected > 0 \(inf: no clipping\)") for v in (-1, 0, "nan")),
        ("train.seed=-1", r"train\.seed=-1: expected 0\.\."),
        (f"train.seed={2**64}", r"train\.seed=\d+: expected 0\.\."),
        *((f"train.device={d}", f"train.device='{d}': expected auto, cpu or cuda") for d in ("mps", "meta", "cuda:x")),
        ('model.pattern=["swa:4", "full", "full"]', r"3 layers; expected at most model\.n_layers=2"),
        ("model.n_layers=1", r"model\.pattern=\['swa:4', 'full'\]: 2 layers; expected at most model\.n_layers=1"),
        ("data.length=1", "data.length=1: expected >= 2"),
        ("data.length=12", "data.length=12: 2 needles, each asked again, take 13"),
        ("data.keys=1", "data.needles=2: more than the 1 keys"),
        ("data.vocab_size=12", "vocab_size=12: 2 special tokens"),
    ],
)
def test_mistakes_are_named(load, override, named):
    with pytest.raises(ValueError, match=named):
        load(tiny.TOML, override)


def test_muons_rate_is_checked_like_the_other(load):
    with pytest.raises(ValueError, match=r"train\.muon_lr=-1\.0: expected a finite number >= 0"):
        load(tiny.TOML, "train.optimizer=muon", "train.muon_lr=-1.0")


@pytest.mark.parametrize("given", ["data.file=ids.u16", "data.dataset=some/text"])
def test_data_of_ones_own_may_be_short_but_hold_something_to_predict(load, given):
    assert load(tiny.TOML, given, "data.length=2").data.length == 2
    with pytest.raises(ValueError, match=r"data\.length=1: expected >= 2"):
        load(tiny.TOML, given, "data.length=1")


@pytest.mark.parametrize(
    "override",
    ["train.clip=inf", "train.warmup=0", "train.weight_decay=0", "train.lr=0", f"train.seed={2**64 - 1}",
     "train.device=cuda:1", "data.length=20", "train.warmup=99"],
)  # fmt: skip
def test_what_the_bounds_allow(load, override):
    load(tiny.TOML, override)


@pytest.mark.parametrize("key", ["n_layers", "vocab_size", "batch"])
def test_a_missing_key_is_named_with_its_section(load, key):
    text = "\n".join(line for line in tiny.TOML.splitlines() if not line.startswith(key))
    with pytest.raises(ValueError, match=rf"missing key '(model|data|train)\.{key}'"):
        load(text)


def test_a_missing_section_is_named(load):
    with pytest.raises(ValueError, match="missing key 'train'"):
        load(tiny.TOML.split("[train]")[0])


def test_data_that_teaches_nothing_is_an_error(load):
    with pytest.raises(ValueError, match="nothing to learn"):
        load(tiny.TOML, "data.needles=0", "data.copy_share=0")


def test_bad_toml_and_missing_files_are_named(load, tmp_path):
    with pytest.raises(ValueError, match=r"run\.toml: not valid TOML"):
        load("[model")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"b\.toml: not valid TOML"):
        load_config(tmp_path / "b.toml")
    for name in ("nowhere", str(tmp_path / "nowhere.toml"), str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=r"no such config; .*demo"):
            load_config(name)
