"""Pointsman: our own policy. Weigh work by the queue that it lengthens, do not buy one request's punctuality with that
of several, keep what is late away from what is not, and trust the load only while it is fresh.

Source: our own, built on what the papers leave open; `docs/research/policies.md` has the experiments.

- *Cost.* The instance with the least `(queue + prefill / 2) * prefill`. That is by how much the placement lets half the
  sum of squared queues grow, the measure that MaxWeight routing keeps down (Tassiulas and Ephremides 1992; for servers
  that are faster at what is local, Wang, Zhu, Ying, Tan, Zhang 2013). It has no weight to tune: recomputing on an idle
  instance is cheap, and behind a long queue every second of it counts; a hot prefix is spread before its queue is late.
- *Dear.* Where only a colder instance is on time, recomputing there takes work from others. That work, divided by
  the mean work of a request, is how many requests it displaces, if the instance has no slack; the slack is judged by
  how much of the objective its queue fills, to the power of `pressure_power`. Above `displaced_max` requests the
  request is let go late instead. That is work too, but done at the end of the queue of the late: the longer that is, the
  less those feel of it who are on time now, so it is subtracted only for as much of it as the objective is of that
  queue, to the same power.
- *Calm.* While no queue is longer than `calm_queue` objectives, nobody has been given up, and a little lateness costs less
  than work done twice: a detour that displaces `calm_displaced_max` of a request, judged with `calm_pressure_power`, is not
  taken, and the request goes where it costs least. A burst ends sooner so. In a lasting overload a queue soon passes the
  limit, and the rules above and below hold alone.
- *The late.* A request that is on time nowhere, or too dear, can only do harm. It joins the longest queue among the
  instances that hold `late_hit_share` of it, otherwise the longest of all: nobody on time is about to join that. One
  queue collects the late and the others stay short. A prompt that takes longer than the objective even alone is no
  victim of the load; the cost decides for it, so that its prefix is soon there for others. Admission policies refuse
  the late instead.
- *Trapped.* Where all who hold `late_hit_share` of it have queues above `calm_queue` objectives, whoever comes with that
  prefix will be late for as long. It is computed once more where it costs least among queues within the objective, even
  if this one is late there too, unless that displaces more than `displaced_max` requests.
- *Freshness.* When the view is older than `stale_after_s`, a global minimum would send everyone to the same instance.
  Then only `stale_candidates` ring candidates of the prefix count, and an instance that holds `stale_hit_share` of the
  prompt: affinity spreads what load cannot be trusted to spread (DualMap's insight).

Bias: requests that are late anyway wait longest (at most about `late_queue_max_s`). Limits: as good as the
predicted TTFT; it does not look ahead at arrivals or evictions.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.hash_ring import home_among, ring_candidates
from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.routing.base import Choice, RoutingPolicy, options_of


@dataclass(frozen=True)
class Pointsman(RoutingPolicy):
    name: ClassVar[str] = "pointsman"

    displaced_max: float = 1.0
    pressure_power: float = 3.0
    calm_queue: float = 1.5
    calm_displaced_max: float = 0.1
    calm_pressure_power: float = 5.0
    late_hit_share: float = 0.5
    late_queue_max_s: float = 600.0
    stale_after_s: float = 0.25
    stale_candidates: int = 3
    stale_hit_share: float = 0.5

    @override
    def choose(self, view: PoolView) -> Choice:
        options = options_of(view)
        considered = self._trusted(view, options) if view.staleness > self.stale_after_s else options
        if min(option.prefill_seconds for option in considered) > view.budget:
            return self._cheapest(view, considered, considered)
        punctual = [option for option in considered if option.predicted_ttft <= view.budget]
        if not punctual:
            late = self._late(view, considered, "late everywhere")
            return self._rescue(view, considered, late) or late
        detour = self._cheapest(view, punctual, considered)
        if considered is options and max(map(_queue, options)) <= self.calm_queue * view.budget:
            direct = self._cheapest(view, options, options)
            if self._displaced(detour, direct, view, options, self.calm_pressure_power) > self.calm_displaced_max:
                return direct
        late = self._late(view, considered, "on time only at the cost of others")
        queue = late.option.queue_seconds
        felt = (view.budget / queue) ** self.pressure_power if queue > view.budget else 1.0
        displaced = self._displaced(detour, late, view, options, self.pressure_power, felt=felt)
        return late if displaced > self.displaced_max else detour

    def _cheapest(self, view: PoolView, candidates: list[Option], considered: list[Option]) -> Choice:
        costs = [_cost(option) for option in candidates]
        least = min(costs)
        equals = [option for option, cost in zip(candidates, costs, strict=True) if cost == least]
        chosen = _spread(view, equals)
        reason = f"costs least: {chosen.prefill_seconds:.3f} s of work behind {chosen.queue_seconds:.3f} s"
        return Choice(chosen, reason, considered)

    def _displaced(
        self, detour: Choice, instead: Choice, view: PoolView, options: list[Option], power: float, felt: float = 1.0
    ) -> float:
        """How many requests the work that a detour adds displaces, given the slack where it would be done. `felt`: how
        much of the work that it saves elsewhere would have delayed them."""
        if detour.option.prefill_seconds <= instead.option.prefill_seconds:
            return 0.0
        extra = detour.option.prefill_seconds - felt * instead.option.prefill_seconds
        short = [option for option in options if option.queue_seconds <= view.budget]
        waiting = sum(option.waiting for option in short)
        work = sum(option.queue_seconds for option in short)
        if not waiting or not work:
            return 0.0
        pressure = (detour.option.queue_seconds + detour.option.prefill_seconds / 2) / view.budget
        displaced: float = extra * waiting / work * pressure**power
        return displaced

    def _rescue(self, view: PoolView, options: list[Option], late: Choice) -> Choice | None:
        """Where to compute what only the queues of the late hold, for all who come with that prefix; None where others
        hold it too, or it displaces too many."""
        enough = self.late_hit_share * view.request.prompt_tokens
        holders = [option for option in options if option.cached_tokens >= enough]
        if not holders or min(map(_queue, holders)) <= self.calm_queue * view.budget:
            return None
        near = [option for option in options if option.queue_seconds <= view.budget]
        if not near:
            return None
        rescue = self._cheapest(view, near, options)
        displaced = self._displaced(rescue, late, view, options, self.pressure_power, felt=0.0)
        if displaced > self.displaced_max:
            return None
        return Choice(rescue.option, "held only where the late wait: computed again for all who share it", options)

    def _trusted(self, view: PoolView, options: list[Option]) -> list[Option]:
        """What may be chosen from while the load is not fresh."""
        near = ring_candidates(view.eligible, view.ring_key, self.stale_candidates)
        enough = self.stale_hit_share * view.request.prompt_tokens
        holder = max(options, key=lambda option: option.cached_tokens)
        return [o for o in options if o.instance in near or (o is holder and o.cached_tokens >= enough)]

    def _late(self, view: PoolView, options: list[Option], reason: str) -> Choice:
        bounded = [option for option in options if option.queue_seconds <= self.late_queue_max_s]
        if not bounded:
            return Choice(min(options, key=_queue), f"{reason}, and every queue is long: the shortest", options)
        enough = self.late_hit_share * view.request.prompt_tokens
        warm = [option for option in bounded if option.cached_tokens >= enough]
        return Choice(max(warm or bounded, key=_queue), f"{reason}: where it delays nobody who is on time", options)


def _cost(option: Option) -> float:
    """Growth of half the sum of squared queues, square seconds."""
    return (option.queue_seconds + option.prefill_seconds / 2) * option.prefill_seconds


def _queue(option: Option) -> float:
    return option.queue_seconds


def _spread(view: PoolView, equals: list[Option]) -> Option:
    """Of equals: who served this conversation last, else where the prefix belongs."""
    if len(equals) == 1:
        return equals[0]
    known = next((option for option in equals if option.instance == view.last_instance), None)
    if known is not None:
        return known
    home = home_among([option.instance for option in equals], view.ring_key)
    return next(option for option in equals if option.instance == home)
