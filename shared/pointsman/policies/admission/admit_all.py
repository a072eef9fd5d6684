"""Admits all. Limit: past saturation all requests are late."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from pointsman.policies.admission.base import AdmissionPolicy, Refusal
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice


@dataclass(frozen=True)
class AdmitAll(AdmissionPolicy):
    name: ClassVar[str] = "none"

    @override
    def admit(self, view: PoolView, choice: Choice) -> Choice | Refusal:
        return choice
