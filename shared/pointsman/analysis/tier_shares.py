"""Which tier of a cache each prompt token came from. The engine tells how many it did not compute; the decision tells how
many of those only slower tiers had. These are the end of a hit, so a hit shorter than predicted is short of them."""

from collections.abc import Iterable

from pointsman.analysis.placed_alone import is_told_again
from pointsman.contracts.cache import Tier
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestMigrated, RequestPlaced, TierTokens, is_final_end
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.primitives import InstanceId, RequestId, Tokens

NOWHERE: tuple[InstanceId, Tokens, list[TierTokens]] = (InstanceId(""), 0, [])


def delivered_by_tier(hit_tokens: Tokens, loads: Iterable[TierTokens], delivered: Tokens) -> dict[Tier, Tokens]:
    """`hit_tokens`: predicted, with the `loads`. `delivered`: not computed, as the engine tells."""
    loads = list(loads)
    left = max(0, delivered - (hit_tokens - sum(load.tokens for load in loads)))
    found: dict[Tier, Tokens] = {}
    for load in loads:
        taken = min(left, load.tokens)
        found[load.tier] = found.get(load.tier, 0) + taken
        left -= taken
    return {"device": delivered - sum(found.values()), **found}


class TierCounter:
    """Prompt tokens of finished requests by tier, over a log."""

    def __init__(self) -> None:
        self.tokens: dict[Tier, Tokens] = {}
        self.computed: Tokens = 0
        self._prompts: dict[RequestId, Tokens] = {}
        self._placed: dict[RequestId, tuple[InstanceId, Tokens, list[TierTokens]]] = {}

    @property
    def shares(self) -> dict[str, float]:
        """Of the prompt tokens, by tier; `computed`: none."""
        whole = self.computed + sum(self.tokens.values())
        tokens = [*self.tokens.items(), ("computed", self.computed)]
        return {name: count / whole for name, count in tokens} if whole else {}

    def apply(self, event: LogEvent | None) -> None:
        match event:
            case RequestArrived():
                self._prompts[event.request] = event.prompt_tokens
            case RequestPlaced() | RequestMigrated():
                hit = self._prompts.get(event.request, 0) - event.uncached_tokens
                self._placed[event.request] = event.instance, max(0, hit), event.loads
            case RequestGranted() if event.stamp is None:
                if not is_told_again(event, self._placed.get(event.request, NOWHERE)[0]):
                    self._placed.pop(event.request, None)  # its ingress chose the engine itself
            case RequestFinished():
                self._finish(event)
            case _ if is_final_end(event):
                self._forget(event.request)
            case _:
                pass

    def _finish(self, event: RequestFinished) -> None:
        _, hit, loads = self._placed.get(event.request, NOWHERE)
        self._forget(event.request)
        if event.cached_tokens < 0 or event.prompt_tokens < 0:
            return
        delivered = min(event.cached_tokens, event.prompt_tokens)
        self.computed += event.prompt_tokens - delivered
        for tier, tokens in delivered_by_tier(hit, loads, delivered).items():
            self.tokens[tier] = self.tokens.get(tier, 0) + tokens

    def _forget(self, request: RequestId) -> None:
        self._prompts.pop(request, None)
        self._placed.pop(request, None)
