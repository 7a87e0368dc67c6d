"""The parts of the Hugging Face hub's HTTP interface that `huggingface_hub` uses to write and to read models."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class FakeHub(ThreadingHTTPServer):
    """Repositories in memory: the commits of each, the newest last."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, list[tuple[str, Files]]] = {}
        self.objects: Files = {}  # large files, by their hash
        self.writers = {"hf_writer"}  # tokens that may write

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, repo: str, files: Files) -> str:
        """Add a commit of all files; its name."""
        name = hashlib.sha1(repr((repo, len(self.commits.get(repo, [])), sorted(files))).encode()).hexdigest()
        self.commits.setdefault(repo, []).append((name, files))
        return name

    def find(self, repo: str, revision: str) -> tuple[str, Files] | None:
        commits = self.commits[repo]
        return commits[-1] if revision == "main" else next((one for one in commits if one[0] == revision), None)

    def environment(self, home: Path, *, token: str = "hf_writer") -> dict[str, str]:
        """The variables that lead `huggingface_hub` here, with a cache of its own."""
        own = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
        return {**os.environ, **own, "HF_HUB_DISABLE_TELEMETRY": "1"}

    def python(
        self, code: str, home: Path, *, token: str = "hf_writer", arguments: Iterable[Any] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run code in a process of its own: the library reads its environment as it is imported."""
        environment = self.environment(home, token=token)
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """A hub on a free port of this machine."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            kind, revision = parts[4:6] if len(parts) > 5 else ("revision", "main")
            self._describe("/".join(parts[2:4]), revision, as_tree=kind == "tree")
        elif parts[2:3] == ["resolve"]:
            self._send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._answer(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"] or 0))
        parts = urlsplit(self.path).path.strip("/").split("/")
        if self.headers.get("authorization", "").removeprefix("Bearer ") not in self.server.writers:
            self._answer(403, {"error": "this token may not write"})
        elif parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            self.server.commits.setdefault(repo, [])
            self._answer(200, {"url": f"{self.server.address}/{repo}", "name": repo})
        elif parts == ["api", "validate-yaml"]:  # of the page
            self._answer(200, {"warnings": [], "errors": []})
        elif parts[4:5] == ["preupload"]:
            files = json.loads(body)["files"]
            kinds = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            answer = [{"path": path, "uploadMode": kind, "shouldIgnore": False} for path, kind in kinds.items()]
            self._answer(200, {"files": answer})
        elif parts[-2:] == ["objects", "batch"]:
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.server.address}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif parts[4:5] == ["commit"]:
            self._commit("/".join(parts[2:4]), body)
        else:
            self._answer(404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.objects[hashlib.sha256(body).hexdigest()] = body
        self._answer(200, {})

    def _commit(self, repo: str, body: bytes) -> None:
        files: Files = {}
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        name = self.server.add(repo, files)
        self._answer(200, {"commitUrl": f"{self.server.address}/{repo}/commit/{name}", "commitOid": name})

    def _describe(self, repo: str, revision: str, *, as_tree: bool) -> None:
        if (found := self._find(repo, revision)) is None:
            return
        name, files = found
        if as_tree:
            self._answer(200, [{"type": "file", "path": p, "size": len(d), "oid": "0"} for p, d in files.items()])
        else:
            self._answer(200, {"id": repo, "sha": name, "siblings": [{"rfilename": path} for path in files]})

    def _send_file(self, repo: str, revision: str, path: str) -> None:
        if (found := self._find(repo, revision)) is None:
            return
        name, files = found
        if path not in files:
            self._answer(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": name})
        else:
            headers = {"ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"', "X-Repo-Commit": name}
            self._answer(200, files[path], headers)

    def _find(self, repo: str, revision: str) -> tuple[str, Files] | None:
        found = self.server.find(repo, revision) if repo in self.server.commits else None
        if found is None:
            missing = "RevisionNotFound" if repo in self.server.commits else "RepoNotFound"
            self._answer(404, {"error": missing}, {"X-Error-Code": missing})
        return found

    def _answer(self, status: int, body: Any = b"", headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
