"""What a shadow policy decided: one decision beside that of the policy in force, and sums of them."""

from typing import Literal

import msgspec

from pointsman.primitives import EngineSeconds, InstanceId, RequestId, Sequence, Tenant, Tokens

Agreement = Literal["same", "other", "shadow_rejects", "shadow_places", "both_reject"]


class ShadowDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Empty instance: rejected. `predicted_ttft` counts from the decision; None without an instance."""

    sequence: Sequence
    at: EngineSeconds
    request: RequestId
    tenant: Tenant
    agreement: Agreement
    prompt_tokens: Tokens
    running_instance: InstanceId
    running_reason: str
    running_cached_tokens: Tokens
    running_predicted_ttft: EngineSeconds | None
    shadow_instance: InstanceId
    shadow_reason: str
    shadow_cached_tokens: Tokens
    shadow_predicted_ttft: EngineSeconds | None


class DecisionFigures(msgspec.Struct, kw_only=True):
    """Sums. Tokens and TTFT are of the `placed` requests, which both placed."""

    since: EngineSeconds
    decided: int = 0
    same: int = 0
    other: int = 0
    shadow_rejects: int = 0
    shadow_places: int = 0
    both_reject: int = 0
    placed: int = 0
    prompt_tokens: Tokens = 0
    running_cached_tokens: Tokens = 0
    shadow_cached_tokens: Tokens = 0
    running_predicted_ttft: EngineSeconds = 0.0
    shadow_predicted_ttft: EngineSeconds = 0.0

    @property
    def agreement(self) -> float | None:
        return (self.same + self.both_reject) / self.decided if self.decided else None

    @property
    def regret_seconds(self) -> EngineSeconds | None:
        """Predicted TTFT that the policy in force costs more, a request."""
        return (self.running_predicted_ttft - self.shadow_predicted_ttft) / self.placed if self.placed else None

    @property
    def hit_rate_gain(self) -> float | None:
        """Share of prompt tokens that the shadow would have found cached in addition."""
        gained = self.shadow_cached_tokens - self.running_cached_tokens
        return gained / self.prompt_tokens if self.prompt_tokens else None

    def add(self, decision: ShadowDecision) -> None:
        self.decided += 1
        setattr(self, decision.agreement, getattr(self, decision.agreement) + 1)
        running, shadow = decision.running_predicted_ttft, decision.shadow_predicted_ttft
        if running is None or shadow is None:
            return
        self.placed += 1
        self.prompt_tokens += decision.prompt_tokens
        self.running_cached_tokens += decision.running_cached_tokens
        self.shadow_cached_tokens += decision.shadow_cached_tokens
        self.running_predicted_ttft += running
        self.shadow_predicted_ttft += shadow
