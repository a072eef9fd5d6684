"""As much of an API server as the pods of deploy/kubernetes talk to, over TLS: Secrets, and EndpointSlices with watch. Who
asks has the rights of a Role of the manifests, and no others. (`kube_api.py` has the faults of a real one.)"""

import base64
import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml  # type: ignore[import-untyped]  # its stubs are not worth a dependency
from typing_extensions import override

from tests.support.certificates import Authority
from tests.support.manifests import NAMESPACE, Object

SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
GROUPS = {SECRETS: ("", "secrets"), SLICES: ("discovery.k8s.io", "endpointslices")}
VERBS = {"GET": "get", "POST": "create", "PUT": "update"}
HOLD_SECONDS = 0.2


class RbacApi:
    """`roles` by the account, whose token is its name."""

    def __init__(self, directory: Path, roles: Mapping[str, Object]) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        self.seen: list[tuple[str, str, str]] = []
        """Account, verb, resource."""
        self._rules = {account: role["rules"] for account, role in roles.items()}
        self._slices: list[tuple[int, Object]] = []
        """Every state of a slice with its version, in order."""
        self._directory = directory
        self._changed = threading.Condition()
        self._stopping = False
        authority = Authority(directory, "cluster")
        self._authority = authority.file
        self._certificate = authority.issue("api")

    def put_slice(self, found: Object) -> None:
        with self._changed:
            version = len(self._slices) + 1
            metadata = {**found["metadata"], "resourceVersion": str(version)}
            self._slices.append((version, {**found, "metadata": metadata}))
            self._changed.notify_all()

    def in_pod(self, account: str) -> dict[str, str]:
        """Environment that stands for the files of a pod's service account."""
        directory = self._directory / account
        directory.mkdir(exist_ok=True)
        (directory / "token").write_text(account)
        (directory / "ca.crt").write_bytes(self._authority.read_bytes())
        host = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self._port)}
        return {**host, "SERVICE_ACCOUNT": str(directory)}

    def kubeconfig(self, account: str) -> dict[str, str]:
        """The same for Kubernetes' client library, whose path to those files is fixed."""
        cluster = {"server": f"https://127.0.0.1:{self._port}", "certificate-authority": str(self._authority)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "pod",
            "clusters": [{"name": "pod", "cluster": cluster}],
            "users": [{"name": "pod", "user": {"token": account}}],
            "contexts": [{"name": "pod", "context": {"cluster": "pod", "user": "pod", "namespace": NAMESPACE}}],
        }
        path = self._directory / f"{account}.yaml"
        path.write_text(yaml.safe_dump(content))
        return {"KUBECONFIG": str(path)}

    @contextmanager
    def serving(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate.certificate, self._certificate.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        self._port = int(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self._stopping = True
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, method: str, target: str, account: str, body: Any) -> Iterator[tuple[int, Any]]:
        """Status and body; of a watch, each event."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        collection = next((known for known in GROUPS if path.startswith(known)), "")
        name = path.removeprefix(collection).removeprefix("/")
        verb = ("watch" if "watch" in query else "list") if method == "GET" and not name else VERBS[method]
        self.seen.append((account, verb, GROUPS.get(collection, ("", path))[1]))
        if account not in self._rules:
            yield 401, {}
        elif not any(_allows(rule, verb, collection, name) for rule in self._rules[account]):
            yield 403, {}
        elif collection == SECRETS:
            yield self._secret(verb, name or body["metadata"]["name"], body)
        elif verb == "list":
            newest = {found["metadata"]["name"]: found for _, found in self._slices}
            metadata = {"resourceVersion": str(len(self._slices))}
            kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
            yield 200, {**kind, "metadata": metadata, "items": [s for s in newest.values() if _selected(s, query)]}
        else:
            yield from self._watch(int(query["resourceVersion"][0]), query)

    def _watch(self, version: int, query: dict[str, list[str]]) -> Iterator[tuple[int, Any]]:
        while not self._stopping:
            with self._changed:
                self._changed.wait(HOLD_SECONDS)
                news = [(number, found) for number, found in self._slices if number > version]
            for number, found in news:
                version = number
                if _selected(found, query):
                    yield 200, {"type": "MODIFIED", "object": found}

    def _secret(self, verb: str, name: str, body: Any) -> tuple[int, Any]:
        there = self.secrets.get(name)
        if verb == "get":
            return (404, {}) if there is None else (200, {"data": {key: _encoded(text) for key, text in there.items()}})
        if (verb == "create") != (there is None):
            return (404 if there is None else 409), {}
        self.secrets[name] = dict(body["stringData"])
        return 201, body


def _handler(api: RbacApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            account = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            begun = False
            try:
                for code, found in api.answer(self.command, self.path, account, body):
                    if not begun:
                        self.send_response(code)
                        self.send_header("content-type", "application/json")
                        self.end_headers()
                    begun = True
                    self.wfile.write(json.dumps(found).encode() + b"\n")
                    self.wfile.flush()
            except OSError:
                pass  # who asked is gone

        do_GET = do_POST = do_PUT = answer  # noqa: N815 - http.server's names

        @override
        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler


def _allows(rule: Object, verb: str, collection: str, name: str) -> bool:
    """RBAC knows no name of what is created."""
    group, resource = GROUPS.get(collection, ("?", "?"))
    named = rule.get("resourceNames")
    return (
        group in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and (named is None or name in named)
    )


def _selected(found: Object, query: dict[str, list[str]]) -> bool:
    labels = found["metadata"]["labels"]
    wanted = [term.split("=") for text in query.get("labelSelector", []) for term in text.split(",")]
    return all(labels.get(key) == value for key, value in wanted)


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
