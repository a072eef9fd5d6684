"""Access to a cluster: the pod's service account, else the kubeconfig, which is only read. The client library is imported
here alone, and late: it takes 60 MB that only its users pay."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from pointsman.adapters.clocks import loop_seconds

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE = "KUBERNETES_SERVICE_HOST"
KUBECONFIG_VARIABLE = "KUBECONFIG"
DEFAULT_KUBECONFIG = "~/.kube/config"
DEFAULT_NAMESPACE = "default"
FRESH_WALL_SECONDS = 60.0
LOAD_WALL_SECONDS = 30.0
"""Of a kubeconfig, whose plug-in may ask a server."""
TEXT_SHOWN_MAX = 300


class Status(msgspec.Struct):
    """What an API server answers instead of an object."""

    code: int | None = None
    reason: str | None = None
    message: str | None = None


class ClusterError(Exception):
    """The client library is missing, or no cluster is known."""


class Cluster:
    """Which API server, as whom. `namespace`: the account's own, known after `configuration`."""

    def __init__(self) -> None:
        """Raises ClusterError."""
        try:
            from kubernetes_asyncio import client, config
        except ImportError as error:
            raise ClusterError("Kubernetes needs its client: pip install 'pointsman[kubernetes]'") from error
        self.client: Any = client
        self._config: Any = config
        self._kubeconfig = "" if HOST_VARIABLE in os.environ else _kubeconfig()
        self._loaded: Any = None
        self._fresh_until = 0.0
        self._loading: asyncio.Task[Any] | None = None
        """Goes on though its caller has given up: nothing ends a plug-in that hangs, so it gets no second beside it."""
        self.errors: tuple[type[Exception], ...] = (
            client.ApiException,
            config.ConfigException,
            aiohttp.ClientError,
            TimeoutError,
            OSError,
            ValueError,  # a body that is no JSON, a URL that is none, an object the library's models refuse
        )
        """What a call raises if the cluster does not do as asked."""
        self.namespace = DEFAULT_NAMESPACE

    @asynccontextmanager
    async def api(self) -> AsyncGenerator[Any, None]:
        """An ApiClient. Raises `errors`."""
        async with self.client.ApiClient(await self.configuration()) as api:
            yield api

    async def configuration(self) -> Any:
        """Read again after FRESH_WALL_SECONDS: credentials of a kubeconfig expire, or are replaced. Raises `errors`."""
        if loop_seconds() < self._fresh_until:
            return self._loaded
        loading = self._loading = self._loading or asyncio.ensure_future(self._load())
        await asyncio.wait({loading}, timeout=LOAD_WALL_SECONDS)
        if not loading.done():
            raise TimeoutError(
                f"the credentials of {self._kubeconfig} have not come for {LOAD_WALL_SECONDS:g} s; does their plug-in hang?"
            )
        self._loading = None
        self._loaded, self._fresh_until = loading.result(), loop_seconds() + FRESH_WALL_SECONDS
        return self._loaded

    async def _load(self) -> Any:
        """Raises `errors`."""
        configuration = self.client.Configuration()
        if self._kubeconfig:
            self.namespace = await self._from_kubeconfig(configuration)
        else:
            self._config.load_incluster_config(configuration)
            own = ACCOUNT / "namespace"
            self.namespace = own.read_text().strip() if own.exists() else DEFAULT_NAMESPACE
        return configuration

    async def _from_kubeconfig(self, configuration: Any) -> str:
        try:
            loader = await self._config.load_kube_config(
                self._kubeconfig, client_configuration=configuration, persist_config=False
            )
        except Exception as error:  # its parser has errors of its own, for instance for a file that is being written
            raise self._config.ConfigException(f"{self._kubeconfig}: {reason_of(error)}") from error
        context = (loader.current_context or {}).get("context") or {}
        return str(context.get("namespace") or DEFAULT_NAMESPACE)


def reason_of(error: BaseException) -> str:
    """One line: of a refusal the server's message, which names the right that is missing."""
    reason = message_of(getattr(error, "body", None) or b"")[:TEXT_SHOWN_MAX] or getattr(error, "reason", None)
    status = getattr(error, "status", None)
    return f"{status} {reason}" if reason and status else str(reason or "") or str(error) or type(error).__name__


def message_of(body: bytes | str) -> str:
    """Of a Status, else empty."""
    try:
        return msgspec.json.decode(body, type=Status).message or ""
    except (msgspec.MsgspecError, RecursionError):
        return ""


def _kubeconfig() -> str:
    paths = os.environ.get(KUBECONFIG_VARIABLE) or DEFAULT_KUBECONFIG
    if not any(Path(path).expanduser().exists() for path in paths.split(os.pathsep)):
        raise ClusterError(f"no cluster is known: this is no pod, and there is no {paths}")
    return str(Path(paths).expanduser()) if os.pathsep not in paths else paths
