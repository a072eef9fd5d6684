"""Admission policies: whether to reject a placed request early (Mooncake), which keeps others on time."""

from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.admission.predicted_ttft import PredictedTtft
from pointsman.policies.admission.predicted_ttft_fair import PredictedTtftFair
from pointsman.policies.admission.predicted_ttft_global import PredictedTtftGlobal

ADMISSION_POLICIES: dict[str, type[AdmissionPolicy]] = {
    policy.name: policy for policy in (AdmitAll, PredictedTtft, PredictedTtftFair, PredictedTtftGlobal)
}
DEFAULT_ADMISSION = PredictedTtftFair.name

__all__ = ["ADMISSION_POLICIES", "DEFAULT_ADMISSION", "AdmissionPolicy", "Refusal"]
