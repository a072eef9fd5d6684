"""The default secret is in the source, so anybody can compute the block keys made with it: good enough for engines on
one's own machine only."""

import click
import structlog

from pointsman.adapters.tcp_ports import is_loopback
from pointsman.runtime.health import HealthBoard
from pointsman.runtime.settings import PUBLIC_SECRET

log = structlog.get_logger()
SECRET_PART = "secret"
REASON = "the default secret is public: whoever reads the log can test which prompts were sent; set POINTSMAN_SECRET"


def note_public_secret(secret: str, host: str, board: HealthBoard) -> None:
    """Degraded, with a warning, while the default is in use. Raises click.UsageError for a service that listens on
    more than loopback."""
    if secret != PUBLIC_SECRET:
        return
    if not is_loopback(host):
        raise click.UsageError(f"listening on {host} takes a secret of your own: {REASON}")
    board.degraded(SECRET_PART, REASON)
    log.warning("public_secret", note=REASON)
