"""`import hybridscope` is light: the heavy libraries load with the first name that needs them."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformer_lens", "transformers", "nnsight", "pandas", "matplotlib", "sklearn", "fla")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    loaded = run(f"import hybridscope, sys; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_config_needs_no_torch() -> None:
    code = "import hybridscope as hs, sys; hs.HybridConfig(('full',), 1, 8, 2, 9); print('torch' in sys.modules)"
    assert run(code) == "False"


def test_names_are_listed_before_they_are_loaded() -> None:
    code = "import hybridscope as hs, sys; print({'HybridLM', 'attention_stats', 'figures'} <= set(dir(hs)))"
    assert run(code) == "True"


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    import hybridscope

    assert set(hybridscope.__all__) == {*hybridscope._HOME, "figures", "__version__"}
    for name in hybridscope._HOME:
        assert getattr(hybridscope, name).__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    import hybridscope

    with pytest.raises(AttributeError, match="no attribute 'HybridML'"):
        _ = hybridscope.HybridML
