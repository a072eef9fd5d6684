"""Pointsman: our own policy. Charge a placement for the work it causes, keep what is late away from what is not, and
trust the load only while it is fresh.

Source: our own, built on what the papers leave open; `docs/policies.md` has the experiments.

- *Cost.* The instance with the least `queue + prefill + price * (prefill - least prefill anywhere)`. The last term is
  what recomputing costs others: each second of it is a second for everyone behind. So the price is not a constant but
  grows with the number of requests that wait: `price = price_idle + price_waiting * waiting requests per instance`.
- *The late.* Among instances where the request meets its objective the cost decides. Where it meets it nowhere, because
  every queue is too long, it can only do harm: it stays where most of it is cached if that is nearly free
  (`late_hit_share`), and otherwise joins the longest queue, which nobody on time is about to join. One queue collects
  the late and the others stay short. A prompt that takes longer than the objective even alone is no victim of the
  load; the cost decides for it, so that its prefix is soon there for others. Admission policies refuse the late instead.
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

    price_idle: float = 1.0
    price_waiting: float = 1.0
    late_hit_share: float = 0.5
    late_queue_max_s: float = 600.0
    stale_after_s: float = 0.25
    stale_candidates: int = 3
    stale_hit_share: float = 0.5

    @override
    def choose(self, view: PoolView) -> Choice:
        options = options_of(view)
        considered = self._trusted(view, options) if view.staleness > self.stale_after_s else options
        least_prefill = min(option.prefill_seconds for option in considered)
        punctual = [option for option in considered if option.predicted_ttft <= view.budget]
        if not punctual and least_prefill <= view.budget:
            return self._late(view, considered)
        waiting = sum(option.waiting for option in options) / len(options)
        price = self.price_idle + self.price_waiting * waiting
        candidates = punctual or considered
        costs = [o.predicted_ttft + price * (o.prefill_seconds - least_prefill) for o in candidates]
        least = min(costs)
        equals = [option for option, cost in zip(candidates, costs, strict=True) if cost == least]
        return Choice(_spread(view, equals), f"costs least, {least:.3f} s at a price of {price:.2f}", considered)

    def _trusted(self, view: PoolView, options: list[Option]) -> list[Option]:
        """What may be chosen from while the load is not fresh."""
        near = ring_candidates(view.eligible, view.ring_key, self.stale_candidates)
        enough = self.stale_hit_share * view.request.prompt_tokens
        holder = max(options, key=lambda option: option.cached_tokens)
        return [o for o in options if o.instance in near or (o is holder and o.cached_tokens >= enough)]

    def _late(self, view: PoolView, options: list[Option]) -> Choice:
        warmest = min(options, key=lambda option: (option.prefill_seconds, option.queue_seconds))
        if warmest.cached_tokens >= self.late_hit_share * view.request.prompt_tokens:
            return Choice(warmest, "late everywhere: where most of it is cached it costs others least", options)
        bounded = [option for option in options if option.queue_seconds <= self.late_queue_max_s]
        if not bounded:
            return Choice(min(options, key=_queue), "late everywhere, and every queue is long: the shortest", options)
        longest = max(bounded, key=_queue)
        return Choice(longest, "late everywhere: where it delays nobody who is on time", options)


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
