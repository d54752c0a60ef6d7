"""A hub on this machine: an HTTP server on loopback that answers as much of the hub's API as is asked of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


class Hub:
    """Repositories by revision: `put` adds the files of a folder; `asked` counts the bodies that were served.

    `broken` names files whose download breaks off half way; `lost` revisions that are listed but not there.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, Path]] = {}
        self.broken: set[str] = set()
        self.lost: set[str] = set()
        self.asked: list[str] = []
        self.url = ""

    def put(self, repo: str, revision: str, folder: Path) -> None:
        self.files[repo, revision] = {f.name: f for f in folder.iterdir() if f.is_file()}

    def sha(self, repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo}{revision}".encode()).hexdigest()


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    class Answer(_Answer):
        content = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answer(BaseHTTPRequestHandler):
    content: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        parts = unquote(self.path.split("?")[0]).strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[2:] if api else parts  # "api", "models"
        repo, verb, *rest = "/".join(parts[:2]), parts[2], *parts[3:]
        known = {name: revision for at, revision in self.content.files if at == repo for name in [revision]}
        if not known:
            return self._error("RepoNotFound")
        if verb == "refs":
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": self._sha(repo, n)} for n in known]
            return self._json({"branches": branches, "tags": [], "converts": []})
        shas = {self._sha(repo, name): name for name in known}
        revision = shas.get(rest[0], rest[0])
        if revision not in known or revision in self.content.lost:
            return self._error("RevisionNotFound")
        files = self.content.files[repo, revision]
        if verb == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": repo, "sha": self._sha(repo, revision), "siblings": siblings})
        if verb == "tree":
            return self._json([self._entry(name, file) for name, file in files.items()])
        name = rest[1]
        if name not in files:
            return self._error("EntryNotFound")
        data = files[name].read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", self._sha(repo, revision))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.content.asked.append(f"{revision}/{name}")
            self.wfile.write(data[: len(data) // 2] if name in self.content.broken else data)
        return None

    def _sha(self, repo: str, revision: str) -> str:
        return self.content.sha(repo, revision)

    def _entry(self, name: str, file: Path) -> dict[str, Any]:
        digest, size = hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_size
        lfs = {"lfs": {"oid": digest, "size": size, "pointerSize": 1}} if name.endswith("safetensors") else {}
        return {"type": "file", "path": name, "size": size, "oid": digest[:40], **lfs}

    def _json(self, data: Any) -> None:
        text = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _error(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
