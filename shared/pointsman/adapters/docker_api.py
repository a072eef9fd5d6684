"""Access to a Docker daemon. The client library is imported here alone, and late: only its users have it. It blocks."""

from typing import Any


class DockerMissingError(Exception):
    """The client library is not installed."""


class Docker:
    """Which daemon. `url`: empty: from the environment."""

    def __init__(self, url: str = "") -> None:
        """Raises DockerMissingError."""
        try:
            import docker
        except ImportError as error:
            raise DockerMissingError("Docker needs its client: pip install 'pointsman[docker]'") from error
        self._library: Any = docker
        self._url = url
        self.errors: tuple[type[Exception], ...] = (docker.errors.DockerException, OSError)
        """What a call raises if the daemon does not do as asked."""
        self.not_found: type[Exception] = docker.errors.NotFound
        self.image_not_found: type[Exception] = docker.errors.ImageNotFound

    def connected(self, *, timeout: int | None) -> Any:
        """A DockerClient. `timeout`: wall seconds of a call. Raises `errors`."""
        if self._url:
            return self._library.DockerClient(base_url=self._url, timeout=timeout)
        return self._library.from_env(timeout=timeout)
