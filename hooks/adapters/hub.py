"""Checkpoints on the Hugging Face hub: revisions as steps, files fetched when they are needed, errors in one line.

Offline (HF_HUB_OFFLINE=1) the hub's cache on this machine stands in: the snapshots that were fetched before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint

PARTS = ("*.json", "*.txt", "*.model", "*.py", "*.jinja")
WEIGHTS = ("*.safetensors", "*.bin")  # the second only where there are none of the first
UNCONNECTED = ("ConnectError", "ConnectTimeout")  # of whichever HTTP client huggingface_hub uses
NOT = ("*/*", "consolidated*", "training_args.bin")  # copies in other formats, and what is no weight


def snapshot(repo: str, revision: str | None = None) -> Path:
    """The folder of a model's revision in the hub's cache, after fetching what is not there yet.

    Raises ValueError for a revision that the repository does not have, OSError for a repository or a connection that
    is not there, or a download that broke off.
    """
    from huggingface_hub import snapshot_download

    for weights in WEIGHTS:
        with _errors(repo, revision):
            patterns = [*PARTS, weights]
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=[*NOT]))
        if list(folder.glob(weights)):
            return folder
    return folder  # whoever loads it says what is missing


def revisions(repo: str) -> list[str]:
    """Names of a repository's branches and tags; offline, those in the cache."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        refs = _cache(repo) / "refs"
        found = [str(f.relative_to(refs)) for f in refs.rglob("*") if f.is_file()] if refs.is_dir() else []
        if not found:
            raise OSError(f"{repo}: no such folder, and not to be had from the hub: offline, and not in {refs.parent}")
        return sorted(found)
    with _errors(repo, None):
        refs = HfApi().list_repo_refs(repo)
    return [ref.name for ref in (*refs.branches, *refs.tags)]


def checkpoints(repo: str, wanted: dict[str, tuple[int, int | None]]) -> tuple[list[Checkpoint], dict[int, str]]:
    """A checkpoint for every revision of `wanted` (its step and tokens), and what is wrong with the others by step.

    Nothing but the hub's lists of files is read.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return [HubCheckpoint(repo, name, *at) for name, at in wanted.items()], {}

    def look(name: str) -> Checkpoint | str:
        try:
            return HubCheckpoint(repo, name, *wanted[name], digest=_digest(repo, name))
        except (OSError, ValueError) as error:
            return _line(error)

    with ThreadPoolExecutor(8) as pool:
        looked = dict(zip(wanted, pool.map(look, wanted), strict=True))
    problems = {wanted[name][0]: found for name, found in looked.items() if isinstance(found, str)}
    return [found for found in looked.values() if not isinstance(found, str)], problems


class HubCheckpoint(Checkpoint):
    """A revision on the hub; it is fetched when its path, its tensors or its model are first asked for."""

    def __init__(
        self, repo: str, revision: str, step: int, tokens: int | None = None, digest: str | None = None
    ) -> None:
        super().__init__(repo, step, tokens)
        self.repo, self.revision = repo, revision
        self._digest = digest
        self._folder: Path | None = None

    def __repr__(self) -> str:
        return f"HubCheckpoint(step={self.step}, {self.repo}@{self.revision})"

    @property
    def path(self) -> Path:
        """Its folder in the hub's cache."""
        if self._folder is None:
            self._folder = snapshot(self.repo, self.revision)
        return self._folder

    def weight_hash(self, sample: bool = False) -> str:
        """SHA-256 of the weight file's content as the hub lists it (of several: of their list), without fetching."""
        return super().weight_hash(sample) if self._digest is None else self._digest


def _digest(repo: str, revision: str) -> str:
    """See `HubCheckpoint.weight_hash`; FileNotFoundError for a revision without weights."""
    from huggingface_hub import HfApi

    with _errors(repo, revision):
        tree = list(HfApi().list_repo_tree(repo, revision=revision))
    for weights in WEIGHTS:
        files: list[Any] = [
            file
            for file in tree
            if file.path.endswith(weights[1:]) and not file.path.startswith(("consolidated", "training_args"))
        ]
        hashes = [file.lfs.sha256 if file.lfs else file.blob_id for file in sorted(files, key=lambda f: f.path)]
        if hashes:
            return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    raise FileNotFoundError(f"{repo}@{revision}: no safetensors file")


def _cache(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _errors(repo: str, revision: str | None) -> Iterator[None]:
    """Everything that goes wrong with the hub, said in one line."""
    from huggingface_hub import constants, errors

    name = repo if revision is None else f"{repo}@{revision}"
    lost = f"{name}: no such folder, and not to be had from the hub"
    try:
        yield
    except errors.RevisionNotFoundError as error:
        known = revisions(repo)
        some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        raise ValueError(f"{repo}: no revision {revision!r}; it has {some}") from error
    except errors.GatedRepoError as error:
        raise OSError(f"{lost}: access to it has to be asked for there") from error
    except errors.RepositoryNotFoundError as error:
        raise OSError(f"{lost}: no such repository, or a private one") from error
    except Exception as error:  # whatever a connection can end in
        if constants.HF_HUB_OFFLINE:
            raise OSError(f"{lost}: offline (HF_HUB_OFFLINE=1), and not in the cache {_cache(repo)}") from error
        if isinstance(error, errors.LocalEntryNotFoundError) or type(error).__name__ in UNCONNECTED:
            raise OSError(f"{lost}: no connection to {constants.ENDPOINT}") from error
        raise OSError(f"{name}: the hub's answer broke off: {_line(error)}") from error
