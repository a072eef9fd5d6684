"""How many instances of a split pool prefill and how many decode, and which of them change their role. Source: Mooncake
(FAST'25), 5.5, whose operators watch the load and switch nodes; the rule here is our own: of a given total, the split
whose busier role is least busy (min-max), if that is much better than now. Load is in instances' worth of work, so that
both roles compare. Bias: a role that is overloaded looks as loaded as it can be, so a large shift takes several steps.
Limit: instances are taken as equals."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from pointsman.contracts.fleet import DecodeCost, Role
from pointsman.policies.decode_placement import answers_of, kv_tokens
from pointsman.policies.scaling.demand import MEASURED_SECONDS_MIN, prefill_demand
from pointsman.primitives import EngineSeconds, InstanceId, Tokens, plain_sum
from pointsman.state.fleet import Fleet, Instance, Status
from pointsman.state.state import State
from pointsman.state.trackers.service_window import Answer, ServiceWindow
from pointsman.state.workload import Request

BETTER_SHARE = 0.8
"""A split replaces another if its busier role is at most this share as busy."""
AT_ONCE_MAX = 256.0
"""Answers that an engine generates at once, whatever their pace: vLLM's default `--max-num-seqs`."""

SplitRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RoleSizes:
    """Numbers of instances; both 0: roles are not sized."""

    prefill: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode


NOT_SIZED = RoleSizes()


def parse_split(text: str) -> RoleSizes:
    """Raises ValueError."""
    prefill, _, decode = text.partition("+")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise ValueError(f"'{text}' is not P+D with at least one of each; write for instance 2+2")
    return RoleSizes(int(prefill), int(decode))


@dataclass(frozen=True, slots=True)
class RoleDemand:
    """Instances that the load would keep as busy as the policy wants them."""

    prefill: float
    decode: float

    def pressure(self, sizes: RoleSizes) -> float:
        """Of the busier role; 1: as busy as wanted."""
        return max(self.prefill / max(sizes.prefill, 1e-9), self.decode / max(sizes.decode, 1e-9))


def role_demand(
    state: State, window: ServiceWindow, now: EngineSeconds, *, window_s: EngineSeconds, prefill: float, decode: float
) -> RoleDemand:
    """`prefill`: wanted share of time in prefill. `decode`: wanted share of what TPOT objectives, or KV memory, allow.
    Refused requests count as if they were served as others are."""
    since = now - window_s
    prefills, answers = window.prefills(since), window.answers(since)
    span = max(MEASURED_SECONDS_MIN, now - max(since, window.first_at))
    refused = window.outcomes(since).refused
    too_slow = sum(answer.refused for answer in answers)
    work = prefill_demand(state, prefills) / span * _with_refused(len(prefills), refused - too_slow)
    return RoleDemand(
        work / prefill, _decode_work(state, answers) * _with_refused(len(answers) - too_slow, too_slow) / decode
    )


def _with_refused(served: int, refused: int) -> float:
    return (served + refused) / served if served and refused > 0 else 1.0


def _decode_work(state: State, answers: list[Answer]) -> float:
    """Of the answers in flight, the largest of: their number, their tokens per second by the cost model (both against
    what one instance can do within the objective between tokens), their KV memory."""
    queues = state.workload.queues.values()
    decoding = [request for queue in queues for request in queue.decoding.values()]
    example = next((state.fleet[i] for i in (*state.fleet.decoders, *state.fleet.ready)), None)
    if example is None:
        return 0.0
    capacity = example.kv_capacity_tokens
    held = sum(kv_tokens(state, request) for request in decoding) / capacity if capacity > 0 else 0.0
    slo, context = _typical(decoding, answers)
    at_once = answers_within(example.decode, slo, context) if example.decode is not None else 0.0
    if example.decode is None or at_once < 1:
        return held
    cost, each = example.decode, _seconds_each(example.decode, context)
    crowds = [answers_of(state, queue.decoding.values()) for queue in queues if queue.decoding]
    tokens_per_s = plain_sum(crowd / (cost.step_s + crowd * each) for crowd in crowds)
    return max(held, sum(crowds) / at_once, tokens_per_s * (cost.step_s + at_once * each) / at_once)


def answers_within(cost: DecodeCost, slo_tpot: EngineSeconds, context: Tokens) -> float:
    """Answers that one instance can generate at once within the objective; below 1: it misses it with one."""
    each = _seconds_each(cost, context)
    return min(AT_ONCE_MAX, (slo_tpot - cost.step_s) / each) if each > 0 else AT_ONCE_MAX


def _seconds_each(cost: DecodeCost, context: Tokens) -> EngineSeconds:
    return cost.per_request_s + cost.per_context_token_s * context


def _typical(decoding: list[Request], answers: list[Answer]) -> tuple[EngineSeconds, Tokens]:
    """Mean objective and mean tokens in the KV cache of an answer in flight."""
    done = [answer for answer in answers if not answer.refused]
    grown = sum(a.tokens for a in done) // (2 * len(done)) if done else 0
    slos = [request.slo_tpot for request in decoding] or [answer.slo_tpot for answer in done]
    prompts = [request.prompt_tokens for request in decoding] or [answer.prompt_tokens for answer in done]
    if not slos:
        return 0.0, 0
    return plain_sum(slos) / len(slos), sum(prompts) // len(prompts) + grown


def best_split(demand: RoleDemand, total: int, fixed: RoleSizes = NOT_SIZED) -> RoleSizes:
    """`fixed`: instances that cannot change their role. At least one of each role."""
    least, most = max(1, fixed.prefill), total - max(1, fixed.decode)
    splits = [RoleSizes(prefill, total - prefill) for prefill in range(least, most + 1)]
    return min(splits, key=lambda sizes: (demand.pressure(sizes), sizes.prefill), default=NOT_SIZED)


def better_split(demand: RoleDemand, sizes: RoleSizes, fixed: RoleSizes, *, step: int) -> RoleSizes:
    """`sizes`, or one with at most `step` instances switched, if a role is too busy and the best split much better."""
    best, now = best_split(demand, sizes.total, fixed), demand.pressure(sizes)
    if now <= 1 or not best.total or demand.pressure(best) > BETTER_SHARE * now:
        return sizes
    moved = max(-step, min(step, best.prefill - sizes.prefill))
    return RoleSizes(sizes.prefill + moved, sizes.decode - moved)


def in_proportion(sizes: RoleSizes, total: int) -> RoleSizes:
    if total < 2 or not sizes.total:
        return NOT_SIZED
    prefill = min(max(1, round(total * sizes.prefill / sizes.total)), total - 1)
    return RoleSizes(prefill, total - prefill)


def future_role(instance: Instance) -> Role:
    return instance.becomes or instance.role


def staying(fleet: Fleet) -> list[Instance]:
    """Instances that do not leave; those that drain for another role stay."""
    return [instance for instance in fleet.instances if not instance.draining or instance.becomes]


def drained_by_operators(fleet: Fleet) -> list[Instance]:
    return [
        instance for instance in fleet.instances if instance.draining and not instance.leaving and not instance.becomes
    ]


def present_sizes(fleet: Fleet) -> RoleSizes:
    """NOT_SIZED without a split, if no instance can change its role, or if some have both roles for ever."""
    roles = Counter(future_role(instance) for instance in staying(fleet))
    switching = [instance.role_switching for instance in staying(fleet)]
    if not any(switching) or any(i.role == "both" and not i.role_switching for i in staying(fleet)):
        return NOT_SIZED
    return RoleSizes(roles["prefill"], roles["decode"])


def fixed_sizes(fleet: Fleet) -> RoleSizes:
    roles = Counter(instance.role for instance in staying(fleet) if not instance.role_switching)
    return RoleSizes(roles["prefill"], roles["decode"])


@dataclass(frozen=True, slots=True)
class Switch:
    """`undo`: it drains for another role, which it should not take."""

    instance: InstanceId
    role: Role
    undo: bool = False


def role_switches(state: State, sizes: RoleSizes, hung: Collection[InstanceId] = ()) -> list[Switch]:
    """What brings the pool closer to `sizes`, without leaving a role empty. Repeated until it finds none. `hung`: instances
    that do not count."""
    if not sizes.total:
        return []
    instances = [instance for instance in staying(state.fleet) if instance.id not in hung]
    have = Counter(future_role(instance) for instance in instances)
    lacking: dict[SplitRole, int] = {
        "prefill": sizes.prefill - have["prefill"],
        "decode": sizes.decode - have["decode"],
    }
    switches = []
    for instance in instances:
        role = max(lacking, key=lambda role: lacking[role])
        if future_role(instance) == "both" and instance.role_switching and lacking[role] > 0:
            switches.append(Switch(instance.id, role))
            lacking[role] -= 1
    pairs: tuple[tuple[SplitRole, SplitRole], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for old, new in pairs:
        moved = _candidates(state, instances, old)[: max(0, min(-lacking[old], lacking[new]))]
        switches += [Switch(candidate.id, new, undo=bool(candidate.becomes)) for candidate in moved]
    return switches


def _candidates(state: State, instances: list[Instance], role: SplitRole) -> list[Instance]:
    """Least work lost first. One that is ready keeps the role."""
    turning = [i for i in instances if i.becomes == role]
    ready = [i for i in instances if i.role == role and not i.becomes and i.status is Status.READY]
    queues = state.workload.queues
    able = [i for i in ready if i.role_switching]
    able.sort(key=lambda i: (queues[i.id].requests if i.id in queues else 0, state.index.blocks(i.id), i.id))
    return turning + able[: max(0, len(ready) - 1)]


def switch_refusal(fleet: Fleet, instance: InstanceId, becomes: Role | Literal[""]) -> str:
    """Why the instance may not change its role, or ""."""
    if not becomes:
        return ""
    known = fleet[instance]
    if not known.role_switching:
        return f"{instance} cannot change its role: its worker was not started with --role-switching"
    if known.role == becomes:
        return f"{instance} has the role {becomes}"
    others = {i.role for i in fleet.instances if i.id != instance and i.status is Status.READY} | {becomes}
    if not others & {"prefill", "both"} or not others & {"decode", "both"}:
        return f"no other instance with the role {known.role} is ready"
    return ""
