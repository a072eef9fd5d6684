"""Makes the deployment's secret and the users of nats-server, a Secret each. Secrets that are there stay as they are, so it
may run at any time; a deleted one is made anew. The pool's name is in POINTSMAN_POOL, the namespace in NAMESPACE."""

import base64
import json
import os
import secrets
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

ACCOUNT = Path(os.environ.get("SERVICE_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
POOL = os.environ["POINTSMAN_POOL"]
OPERATOR = "local"
SERVICES = ("scheduler", "ingress", "rebalancer", "scaler", "recorder")
USERS, USERS_FILE, ROUTES_FILE = "pointsman-nats-users", "nats-users.conf", "nats-routes.conf"
SERVERS = [f"pointsman-nats-{number}.pointsman-nats" for number in range(3)]
NOT_FOUND, CONFLICT = 404, 409
# Secret, its key, and the file of `pointsman credentials`. The key of an operator is its name on the bus.
SEEDS = (
    *((f"pointsman-nats-{name}", "nats.nk", f"{name}.nk") for name in SERVICES),
    ("pointsman-nats-worker", "nats.nk", f"workers/{POOL}.nk"),
    ("pointsman-nats-reader", "reader.nk", "reader.nk"),
    ("pointsman-nats-console", "console.nk", "console.nk"),
    ("pointsman-nats-operator", f"{OPERATOR}.nk", f"operators/{OPERATOR}.nk"),
)
# Used if somebody made it, in the same form; never made here.
ADMIN = ("pointsman-nats-admin", "admin.nk", "admins/admin.nk")


def main() -> None:
    there = {name: read(name) for name, _, _ in (*SEEDS, ADMIN, ("pointsman-secret", "", ""), (USERS, "", ""))}
    if there["pointsman-secret"] is None:
        create("pointsman-secret", {"secret": secrets.token_urlsafe(32)})
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "credentials"
        directory.mkdir(mode=0o700)
        for name, key, file in (*SEEDS, ADMIN):
            if (known := there[name]) is not None:
                (directory / file).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (directory / file).write_text(known[key])
        if ROUTES_FILE in (there[USERS] or {}):
            (directory / ROUTES_FILE).write_text(there[USERS][ROUTES_FILE])
        command = ["pointsman", "credentials", "--directory", str(directory), "--pool", POOL]
        command += [argument for server in SERVERS for argument in ("--nats-server", server)]
        subprocess.run([*command, "--worker", f"{POOL}/*", "--operator", OPERATOR], check=True)
        made = [(name, {key: (directory / file).read_text()}) for name, key, file in SEEDS if there[name] is None]
        users = {name: (directory / name).read_text() for name in (USERS_FILE, ROUTES_FILE)}
    for name, data in made:
        create(name, data)
    if there[USERS] is None:
        create(USERS, users)
    elif there[USERS] != users:
        call("PUT", f"/{USERS}", secret(USERS, users))
        print(f"changed {USERS}: restart nats, then the processes whose user is new")


def read(name: str) -> dict[str, str] | None:
    answer = call("GET", f"/{name}")
    return answer and {key: base64.b64decode(value).decode() for key, value in answer["data"].items()}


def create(name: str, data: dict[str, str]) -> None:
    """Ends the process if somebody else has just made it: the next run reads it."""
    if call("POST", "", secret(name, data)) is None:
        sys.exit(f"{name} was made at the same time; once more")
    print(f"made {name}")


def secret(name: str, data: dict[str, str]) -> dict:
    labels = {"app.kubernetes.io/name": "pointsman", "app.kubernetes.io/part-of": "pointsman"}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "stringData": data}


def call(method: str, path: str, body: dict | None = None) -> dict | None:
    """Returns None if there is none, or already one. Raises HTTPError, URLError."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    request = Request(
        f"https://{host}:{port}/api/v1/namespaces/{os.environ['NAMESPACE']}/secrets{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"authorization": f"Bearer {(ACCOUNT / 'token').read_text()}", "content-type": "application/json"},
        method=method,
    )
    try:
        with urlopen(request, timeout=10, context=ssl.create_default_context(cafile=ACCOUNT / "ca.crt")) as answer:
            return json.load(answer)
    except HTTPError as error:
        if error.code in (NOT_FOUND, CONFLICT):
            return None
        raise


if __name__ == "__main__":
    main()
