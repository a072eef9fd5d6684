"""Events and commands with the fields that a test does not care about filled in."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import xor
from typing import Any

from msgspec.structs import replace

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, Run
from pointsman.contracts.codec import LogEvent, encode
from pointsman.contracts.commands import FleetDescribed, InstanceDescribed, RouteGranted, RouteRequest
from pointsman.contracts.decisions import RequestGranted, RequestPlaced, RequestRejected
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceJoined, InstanceReported, PrefillCost
from pointsman.contracts.reasons import CancelCause, RejectReason
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from pointsman.ports import LogEntry
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, SessionId, Tenant, Term

COST = PrefillCost(fixed_s=0.0, per_token_s=0.001, per_token_squared_s=0.0)
"""A millisecond a token: 64 tokens, one block, take 0.064 s."""

BLOCK = 64


def joined(instance: str, *, at: float = 0.0, epoch: int = 1, **fields: Any) -> InstanceJoined:
    defaults: dict[str, Any] = {
        "url": f"http://{instance}",
        "model": "m",
        "block_tokens": BLOCK,
        "engine_block_tokens": BLOCK,
        "kv_capacity_tokens": 100_000,
        "max_model_len": 100_000,
        "prefill": COST,
    }
    return InstanceJoined(at=at, instance=InstanceId(instance), epoch=Epoch(epoch), **defaults | fields)


def stored(
    instance: str, sequence: int, keys: list[int], *, parent: int = 0, epoch: int = 1, at: float = 0.0
) -> BlocksStored:
    run = Run(pack_keys([BlockKey(key) for key in keys]), BlockKey(parent))
    return BlocksStored(at=at, instance=InstanceId(instance), epoch=Epoch(epoch), sequence=sequence, runs=[run])


def removed(instance: str, sequence: int, keys: list[int], *, epoch: int = 1, at: float = 0.0) -> BlocksRemoved:
    packed = pack_keys([BlockKey(key) for key in keys])
    return BlocksRemoved(at=at, instance=InstanceId(instance), epoch=Epoch(epoch), sequence=sequence, keys=packed)


def reported(
    instance: str, sequence: int, keys: Sequence[int], *, epoch: int = 1, at: float = 0.0, **fields: Any
) -> InstanceReported:
    defaults: dict[str, Any] = {"serving": True, "waiting": 0, "running": 0, "kv_usage": 0.0}
    return InstanceReported(
        at=at, instance=InstanceId(instance), epoch=Epoch(epoch), sequence=sequence, blocks=len(keys),
        digest=reduce(xor, keys, 0), **defaults | fields,
    )  # fmt: skip


def grant(request: str, instance: str, **fields: Any) -> RouteGranted:
    defaults: dict[str, Any] = {"attempt": 1, "url": "http://a", "hit_tokens": 0, "predicted_ttft": 0.0}
    defaults["knowledge"] = "exact"
    return RouteGranted(request=RequestId(request), instance=InstanceId(instance), **defaults | fields)


def route(
    request: str, keys: Sequence[int], *, arrived_at: float = 0.0, session: str = "", **fields: Any
) -> RouteRequest:
    defaults: dict[str, Any] = {
        "ingress": "ingress-1",
        "tenant": Tenant("t"),
        "prompt_tokens": len(keys) * BLOCK + 1,
        "max_output_tokens": 10,
        "slo_ttft": 5.0,
        "slo_tpot": 0.1,
    }
    packed = pack_keys([BlockKey(key) for key in keys])
    return RouteRequest(
        request=RequestId(request), arrived_at=arrived_at, keys=packed, session=SessionId(session), **defaults | fields
    )


def arrived(request: str, *, at: float = 0.0, tenant: str = "t", **fields: Any) -> RequestArrived:
    defaults: dict[str, Any] = {
        "arrived_at": at,
        "ingress": "i",
        "keys": b"",
        "prompt_tokens": 100,
        "max_output_tokens": 10,
        "slo_ttft": 5.0,
        "slo_tpot": 1.0,
    }
    return RequestArrived(at=at, request=RequestId(request), tenant=Tenant(tenant), **defaults | fields)


def placed(request: str, instance: str, *, at: float = 0.0, **fields: Any) -> RequestPlaced:
    defaults: dict[str, Any] = {
        "hit_blocks": 0,
        "uncached_tokens": 10,
        "queue_seconds": 0.0,
        "prefill_seconds": 0.1,
        "predicted_ttft": 0.1,
        "policy": "p",
        "settings": {},
        "reason": "",
        "candidates": [],
    }
    return RequestPlaced(at=at, request=RequestId(request), instance=InstanceId(instance), **defaults | fields)


def rejected(request: str, reason: str, *, at: float, **fields: Any) -> RequestRejected:
    defaults: dict[str, Any] = {"detail": "", "retry_after": 1.0, "policy": "p", "settings": {}, "candidates": []}
    return RequestRejected(at=at, request=RequestId(request), reason=reason, **defaults | fields)


def first_token(request: str, instance: str, *, at: float, prefill: float | None = None) -> PrefillFinished:
    took = at if prefill is None else prefill
    return PrefillFinished(at=at, request=RequestId(request), instance=InstanceId(instance), ttft=at, prefill=took)


def finished(request: str, instance: str, *, at: float, **fields: Any) -> RequestFinished:
    defaults: dict[str, Any] = {
        "e2e": at, "prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "ttft": at, "tpot": 0.0,
    }  # fmt: skip
    return RequestFinished(at=at, request=RequestId(request), instance=InstanceId(instance), **defaults | fields)


def given_up(request: str, *, at: float, instance: str = "", number: int = 10_000, as_of: int = 0) -> RequestCancelled:
    """By its leader, because its ingress is silent."""
    return RequestCancelled(
        at=at, request=RequestId(request), reason=CancelCause.INGRESS_SILENT.sentence, cause=CancelCause.INGRESS_SILENT,
        instance=InstanceId(instance), stamp=Stamp(term=Term(1), number=number, as_of=as_of),
    )  # fmt: skip


def no_instance(request: str, *, at: float, number: int = 10_000, as_of: int = 0) -> RequestRejected:
    stamp = Stamp(term=Term(1), number=number, as_of=as_of)
    return rejected(request, RejectReason.NO_INSTANCE, at=at, stamp=stamp)


def given_up_before_each_end(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """The log as it would be if a leader had given up every request before its ingress ended it."""
    return _before_each_end(
        entries,
        lambda end, sequence: given_up(
            end.request, at=end.at, instance=end.instance, number=10_000 + sequence, as_of=sequence - 1
        ),
    )


def told_again_before_each_end(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """The log as it would be if another leader had begun, and been told where each request is, before its end."""
    return _before_each_end(
        entries,
        lambda end, _: RequestGranted(at=end.at - 0.001, request=end.request, instance=end.instance),
    )


def _before_each_end(
    entries: Sequence[LogEntry], told: Callable[[RequestFinished | RequestFailed, int], LogEvent]
) -> list[LogEntry]:
    found: list[LogEntry] = []
    sequences = {0: 0}
    for entry in entries:
        event = entry.event
        if isinstance(event, RequestFinished | RequestFailed):
            sequence = len(found) + 1
            found.append(LogEntry.read(sequence, entry.subject, encode(told(event, sequence))))
        sequences[entry.sequence] = len(found) + 1
        if event is not None and event.stamp is not None:
            event = replace(event, stamp=replace(event.stamp, as_of=sequences[event.stamp.as_of]))
        payload = encode(event) if event is not None else entry.payload
        found.append(LogEntry.read(len(found) + 1, entry.subject, payload))
    return found


def with_several_answers(entries: Sequence[LogEntry]) -> list[LogEntry]:
    """The log as it would be if every request had asked for two answers, or had two prompts."""
    return [
        LogEntry.read(entry.sequence, entry.subject, encode(replace(entry.event, answers=2)))
        if isinstance(entry.event, RequestArrived)
        else entry
        for entry in entries
    ]


def fleet_described(**fields: Any) -> FleetDescribed:
    """A leader's answer: one instance that takes requests."""
    instance = InstanceDescribed(
        instance=InstanceId("engine-1"), url="http://engine-1", epoch=Epoch(1), status="ready", knowledge="exact",
        pending=0, in_prefill=0, decoding=0, cached_blocks=0,
    )  # fmt: skip
    defaults: dict[str, Any] = {
        "pool": "default", "policy": "p", "admission": "a", "ordering": "o", "speed": 1.0, "scheduler": "s",
        "term": Term(1), "as_of": 1, "instances": [instance],
    }  # fmt: skip
    return FleetDescribed(**defaults | fields)
