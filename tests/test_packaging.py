"""The package works from a wheel, an editable install and plain PYTHONPATH, from any working folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("hooks", "probes", "experiments", "figures")
IMPORT = "import hybridscope, hybridscope.hooks.config as c; print(hybridscope.__file__, c.__file__, c.ratio('gdn', 1))"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git tracks or would track, so that builds leave nothing in the repository."""
    copy = tmp_path_factory.mktemp("source") / "repo"
    copy.mkdir()
    for name in ("hybridscope", *FOLDERS, "pyproject.toml", "README.md", "LICENSE"):
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPO / name, copy / name)
    return copy


def run(*command: object, cwd: Path, **env: str) -> str:
    out = subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def modules(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for folder in FOLDERS for p in (root / folder).rglob("*.py")}


def test_wheel_holds_every_subpackage(source: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "-q")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "dist", source, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    target = tmp_path / "target"
    run(*pip, "install", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    assert modules(target / "hybridscope") == modules(REPO)
    assert (target / "hybridscope/py.typed").is_file()
    configs = {p.name for p in (REPO / "experiments/configs").glob("*.toml")}
    assert {p.name for p in (target / "hybridscope/experiments/configs").glob("*.toml")} == configs
    assert set(os.listdir(target)) <= {"hybridscope", "bin", *(p.name for p in target.glob("*.dist-info"))}
    out = run(sys.executable, "-c", IMPORT, cwd=tmp_path, PYTHONPATH=str(target))
    assert out.split()[:2] == [str(target / "hybridscope/__init__.py"), str(target / "hybridscope/hooks/config.py")]
    every = "; ".join(f"import hybridscope.{f}" for f in FOLDERS)
    run(sys.executable, "-c", every, cwd=tmp_path, PYTHONPATH=str(target))


def test_editable_install(source: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path))
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))  # dependencies, without the parent's own links
    run(
        sys.executable, "-m", "pip", "-q", "--python", python, "install", "--no-deps", "--no-build-isolation",
        "-e", source, cwd=tmp_path,
    )  # fmt: skip
    out = run(python, "-c", IMPORT, cwd=tmp_path, PYTHONPATH="")
    assert str(source / "hybridscope") in out.split()[0]
    assert str(source) in out.split()[1]


@pytest.mark.parametrize("inside", [True, False])
def test_plain_pythonpath(source: Path, tmp_path: Path, inside: bool) -> None:
    out = run(sys.executable, "-c", IMPORT, cwd=source if inside else tmp_path, PYTHONPATH=str(source))
    assert out.split()[0] == str(source / "hybridscope/__init__.py")
    assert out.endswith("('gdn', 'full')")


def test_import_is_lazy() -> None:
    """Neither torch nor TransformerLens until a name that needs them is used."""
    code = (
        "import sys, hybridscope as hs; hs.HybridConfig; hs.ratio; dir(hs); "
        "heavy = {'torch', 'transformer_lens', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    run(sys.executable, "-c", code, cwd=REPO)


def test_every_public_name_resolves() -> None:
    import hybridscope as hs

    for name in hs.__all__:
        assert getattr(hs, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        hs.nothing_like_it  # noqa: B018
