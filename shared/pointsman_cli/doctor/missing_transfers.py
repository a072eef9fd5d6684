"""Engines that name no KV cache after a prefill, so that the decode engine computes the prompt again."""

from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.formatting import plural


@dataclass(slots=True)
class _Prefiller:
    example: RequestId
    requests: int = 0


class MissingTransfers(Examiner):
    area = "engines"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._prefillers: dict[InstanceId, _Prefiller] = {}

    @override
    def ended(self, end: Ended, state: State) -> None:
        event, request = end.event, end.request
        if (
            isinstance(event, RequestFinished)
            and event.without_transfer
            and request is not None
            and request.prefilled_by
        ):
            self._prefillers.setdefault(request.prefilled_by, _Prefiller(event.request)).requests += 1

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for name, prefiller in sorted(self._prefillers.items()):
            yield self.warning(
                f"{name} named no KV cache after the prefills of {plural(prefiller.requests, 'request')}: the engines that "
                "decoded them computed the prompts again",
                [f"for example {prefiller.example}"],
                f"Give {name} a connector (--kv-transfer-config, docs/engines.md). Connectors that hand over without "
                "kv_transfer_params, as vLLM's ExampleConnector, work all the same.",
            )
