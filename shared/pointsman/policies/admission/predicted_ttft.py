"""Predicted TTFT: refuse what cannot meet its objective where it was placed.

Source: Mooncake (FAST'25), section 7. Compares what is left of the objective with predicted TTFT = queue time +
prefill time, corrected by what the instance taught. Bias: as good as the prediction; long prompts are refused first.
"""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.pool_view import Option, PoolView
from pointsman.policies.routing.base import Choice


@dataclass(frozen=True)
class PredictedTtft(AdmissionPolicy):
    name: ClassVar[str] = "predicted_ttft"

    @override
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        return choice if choice.option.predicted_ttft <= view.budget else too_late(view, choice.option)


def too_late(view: PoolView, option: Option) -> Refusal:
    """The refusal of a request that would be late on this instance."""
    detail = (
        f"predicted time to first token is {option.predicted_ttft:.2f} s on {option.instance}, "
        f"{max(0.0, view.budget):.2f} s are left of the objective of {view.request.slo_ttft:g} s"
    )
    if option.prefill_seconds > view.request.slo_ttft:
        return Refusal("slo_unreachable", f"{detail}; the prompt alone takes longer", option.prefill_seconds)
    return Refusal("slo_ttft", detail, min(option.predicted_ttft - view.budget, option.queue_seconds))
