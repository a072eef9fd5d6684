"""Engines that name no KV cache after a prefill, so that the decode engine computes the prompt again."""

from collections import Counter
from collections.abc import Iterator

from typing_extensions import override

from pointsman.contracts.requests import RequestFinished
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.formatting import plural


class MissingTransfers(Examiner):
    area = "engines"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._requests: Counter[InstanceId] = Counter()
        self._examples: dict[InstanceId, RequestId] = {}

    @override
    def ended(self, end: Ended, state: State) -> None:
        event, request = end.event, end.request
        if (
            isinstance(event, RequestFinished)
            and event.without_transfer
            and request is not None
            and request.prefilled_by
        ):
            self._requests[request.prefilled_by] += 1
            self._examples.setdefault(request.prefilled_by, event.request)

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        for name, count in sorted(self._requests.items()):
            yield self.warning(
                f"{name} named no KV cache after the prefills of {plural(count, 'request')}: the engines that "
                "decoded them computed the prompts again",
                [f"for example {self._examples[name]}"],
                f"Give {name} a connector (--kv-transfer-config, docs/engines.md). Connectors that hand over without "
                "kv_transfer_params, as vLLM's ExampleConnector, work all the same.",
            )
