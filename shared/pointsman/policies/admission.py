"""Admission: whether a placed request is worth starting.

Rejecting early what is already predicted late keeps the others on time (Mooncake, early rejection). The price is
paid by long prompts; `bench` and `simulate` report attainment so that the bias is seen.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.primitives import Seconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not admitted, and when asking again may help (engine seconds)."""

    reason: str
    detail: str
    retry_after: Seconds


class AdmissionPolicy(ABC):
    name: ClassVar[str]

    @abstractmethod
    def refuse(self, view: PoolView, choice: Choice) -> Refusal | None:
        """A refusal, or None to admit."""


class AdmitAll(AdmissionPolicy):
    """Everything is admitted. Limit: past saturation, first come first served queues make everyone late."""

    name: ClassVar[str] = "none"

    @override
    def refuse(self, view: PoolView, choice: Choice) -> Refusal | None:
        return None


class PredictedTtft(AdmissionPolicy):
    """Refuse what cannot meet its TTFT objective where it was placed (Mooncake, section 7).

    Compares what is left of the objective with predicted TTFT = queue time + prefill time, corrected by what the
    instance taught. Bias: as good as the prediction; long prompts are refused first.
    """

    name: ClassVar[str] = "predicted_ttft"

    @override
    def refuse(self, view: PoolView, choice: Choice) -> Refusal | None:
        option = choice.option
        excess = option.predicted_ttft - view.budget
        if excess <= 0:
            return None
        detail = (
            f"predicted time to first token is {option.predicted_ttft:.2f} s on {option.instance}, "
            f"{max(0.0, view.budget):.2f} s are left of the objective of {view.request.slo_ttft:g} s"
        )
        if option.prefill_seconds > view.request.slo_ttft:
            return Refusal("slo_unreachable", f"{detail}; the prompt alone takes longer", option.prefill_seconds)
        return Refusal("slo_ttft", detail, min(excess, option.queue_seconds))


ADMISSION_POLICIES: dict[str, type[AdmissionPolicy]] = {policy.name: policy for policy in (AdmitAll, PredictedTtft)}
DEFAULT_ADMISSION = PredictedTtft.name
