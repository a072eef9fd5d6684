"""What the leader's answer to `cmd.fleet` says that the log cannot: in, FleetDescribed; out, one plain sentence. Who shows
the fleet or reads its log says it first, since the rest is then as old as the last entry."""

from pointsman.adapters.jetstream.producer import STALLED_SECONDS
from pointsman.contracts.commands import FleetDescribed
from pointsman_cli.formatting import plural

STALLED_ADVICE = (
    "The disk of nats-server is full or fails, or its cluster has no quorum: free space, then restart the nats-server. "
    "Requests are served meanwhile, but what is not confirmed after 100 s, or at a stop, is lost (docs/failures.md, disk full)."
)


def stalled_log(fleet: FleetDescribed | None) -> str:
    """Empty if the log takes writes, or if nobody told."""
    if fleet is None or fleet.unconfirmed_seconds < STALLED_SECONDS:
        return ""
    seconds, count = fleet.unconfirmed_seconds, plural(fleet.unconfirmed_writes, "write")
    return (
        f"the log has taken no writes for {seconds:.0f} s: {count} of the leader wait, and what is newer is not in it"
    )
