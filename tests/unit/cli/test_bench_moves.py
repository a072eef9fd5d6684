"""What the bench says of rebalancing, and how a comparison names it."""

from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.decisions import MigrationRefused, RequestMigrated
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, RequestId
from pointsman_cli.bench.moves import moves_in
from tests.support.events import arrived, finished, placed

A, B = InstanceId("a"), InstanceId("b")


def migrated(request: str, *, uncached: int, plan: str = "r.1") -> RequestMigrated:
    return RequestMigrated(
        at=0.0, request=RequestId(request), source=A, instance=B, hit_blocks=0, uncached_tokens=uncached,
        prefill_seconds=0.0, predicted_ttft=0.0, reason="", plan=plan,
    )  # fmt: skip


def refused(request: str) -> MigrationRefused:
    return MigrationRefused(
        at=0.0, request=RequestId(request), source=A, instance=B, reason="no_gain", detail="", plan="r.1", policy="p",
        planned_as_of=1, benefit=1.0,
    )  # fmt: skip


def log_of(*events: LogEvent) -> list[LogEntry]:
    return [LogEntry(number, "", encode(event), event) for number, event in enumerate(events, start=1)]


def test_hits_of_who_moved_count_from_the_first_place_to_the_last() -> None:
    moves = moves_in(
        log_of(
            *(arrived(request) for request in ("stays", "moves", "leaves")),
            placed("stays", A, uncached_tokens=0),
            placed("moves", A, uncached_tokens=20),
            placed("leaves", A, uncached_tokens=50),
            migrated("moves", uncached=90),
            migrated("moves", uncached=40, plan="r.2"),
            migrated("leaves", uncached=100, plan=""),
            refused("stays"),
            finished("moves", "b", at=1.0),
        )
    )

    assert (moves.moved, moves.moves, moves.refused) == (1, 2, {"no_gain": 1})
    assert (moves.hit_rate_placed, moves.hit_rate_moved, moves.hit_rate_found) == (0.8, 0.6, 0.0)


def test_where_nobody_moved_there_is_no_hit_rate() -> None:
    moves = moves_in(log_of(arrived("stays"), placed("stays", A, uncached_tokens=0)))

    assert (moves.moved, moves.hit_rate_placed, moves.hit_rate_found) == (0, None, None)
