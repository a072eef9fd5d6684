"""What a log adapter reports to its process (metrics, logs, health board). Calls must not block or raise."""


class LogListener:
    """Hears nothing. Override what is of interest."""

    def connected(self, server: str) -> None:
        """Connected, the first time or again."""

    def disconnected(self, reason: str) -> None:
        """The connection is lost; the adapter reconnects."""

    def log_ready(self, identity: str) -> None:
        """The pool's stream exists and answers."""

    def log_missing(self, reason: str) -> None:
        """The pool's stream could not be made or does not answer."""

    def appended(self, kind: str) -> None:
        """An event of this type was confirmed as stored."""

    def stalled(self, reason: str) -> None:
        """The log is reached and has confirmed nothing for a while: writes pile up, and will be lost if it goes on."""

    def flowing(self) -> None:
        """It confirms again, after `stalled`."""

    def lost(self, count: int, reason: str) -> None:
        """Events are lost for good: a WritesLost event will say so in the log."""

    def undecodable(self, subject: str, problem: str) -> None:
        """A message is no event or command that we know."""

    def reset(self, reason: str) -> None:
        """A reader lost continuity and starts from the oldest entry that is left."""

    def handler_failed(self, subject: str, error: Exception) -> None:
        """A command handler raised. Its command stays unanswered, the next is served."""

    def trouble(self, what: str, reason: str) -> None:
        """Something else went wrong and is being handled; for the log."""
