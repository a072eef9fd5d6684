"""Callbacks of a log adapter, for metrics, logs and the health board. They must not block or raise."""


class LogListener:
    """Ignores every call; override the relevant ones."""

    def connected(self, server: str) -> None:
        """Also after a reconnect."""

    def disconnected(self, reason: str) -> None:
        pass

    def unreachable(self, reason: str) -> None:
        """An attempt to connect failed; another follows."""

    def forbidden(self, operation: str, subject: str) -> None:
        """The server refused a `publish` or `subscription`."""

    def outdated(self, version: str) -> None:
        """Of the server, after each connection; empty if it is recent enough."""

    def log_ready(self, identity: str) -> None:
        pass

    def log_missing(self, reason: str) -> None:
        pass

    def appended(self, kind: str) -> None:
        pass

    def stalled(self, reason: str) -> None:
        """Connected, but writes are not confirmed and will be lost if it goes on."""

    def flowing(self) -> None:
        pass

    def lost(self, count: int, reason: str) -> None:
        """Lost for good; a WritesLost event follows."""

    def dropped(self, count: int, reason: str) -> None:
        """Lost because this process ends; no event follows. Called once, if at all."""
        self.lost(count, reason)

    def undecodable(self, subject: str, problem: str) -> None:
        pass

    def reset(self, reason: str) -> None:
        pass

    def handler_failed(self, subject: str, error: Exception) -> None:
        """The command stays unanswered."""

    def trouble(self, what: str, reason: str) -> None:
        pass
