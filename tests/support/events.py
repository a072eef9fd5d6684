"""Events and commands with the fields that a test does not care about filled in."""

from typing import Any

from pointsman.contracts.block_keys import pack_keys
from pointsman.contracts.cache import BlocksRemoved, BlocksStored, Run
from pointsman.contracts.commands import FleetDescribed, InstanceDescribed, RouteRequest
from pointsman.contracts.fleet import InstanceJoined, InstanceReported, PrefillCost
from pointsman.contracts.requests import PrefillFinished, RequestFinished
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
    instance: str, sequence: int, keys: list[int], *, epoch: int = 1, at: float = 0.0, serving: bool = True
) -> InstanceReported:
    digest = 0
    for key in keys:
        digest ^= key
    return InstanceReported(
        at=at, instance=InstanceId(instance), epoch=Epoch(epoch), serving=serving, waiting=0, running=0, kv_usage=0.0,
        sequence=sequence, blocks=len(keys), digest=digest,
    )  # fmt: skip


def route(request: str, keys: list[int], *, arrived_at: float = 0.0, session: str = "", **fields: Any) -> RouteRequest:
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


def first_token(request: str, instance: str, *, at: float, prefill: float | None = None) -> PrefillFinished:
    took = at if prefill is None else prefill
    return PrefillFinished(at=at, request=RequestId(request), instance=InstanceId(instance), ttft=at, prefill=took)


def finished(request: str, instance: str, *, at: float) -> RequestFinished:
    return RequestFinished(
        at=at, request=RequestId(request), instance=InstanceId(instance), e2e=at, prompt_tokens=1,
        completion_tokens=1, cached_tokens=0, ttft=at, tpot=0.0,
    )  # fmt: skip


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
