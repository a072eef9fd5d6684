"""Balance: whether requests queue on one instance while another is idle. A single long prompt is no queue, and under
`pointsman` requests that are late everywhere wait at one instance on purpose. Samples are of placements."""

from collections import Counter
from collections.abc import Iterator
from statistics import median_low

from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.requests import RequestArrived
from pointsman.primitives import EngineSeconds, InstanceId
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import EMPTY_QUEUE
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.doctor.late_causes import advice_for
from pointsman_cli.doctor.samples import Sample
from pointsman_cli.explain.causes import Cause

SAMPLE_SECONDS = 1.0
OBJECTIVES_MAX = 256
LONG_SHARE_OF_OBJECTIVE = 0.5
IDLE_SECONDS = 0.1
UNEVEN_SHARE_MAX = 0.1
SAMPLES_MIN = 30


class Balance(Examiner):
    area = "balance"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._due: EngineSeconds = 0.0
        self._samples = 0
        self._uneven = 0
        self._longest: Counter[InstanceId] = Counter()
        self._idle: Counter[InstanceId] = Counter()
        self._objectives: Sample[EngineSeconds] = Sample(OBJECTIVES_MAX)
        self._gathers_late = False

    @override
    def after(self, event: LogEvent, state: State) -> None:
        if isinstance(event, RequestArrived):
            self._objectives.add(event.slo_ttft)
        elif isinstance(event, RequestPlaced):
            self._gathers_late = event.policy == "pointsman"
            if event.at >= self._due and self._objectives.seen:
                self._due = event.at + SAMPLE_SECONDS
                self._sample(event.at, state)

    @property
    def _bound(self) -> EngineSeconds:
        """Of the usual objective: any client may ask for another."""
        return LONG_SHARE_OF_OBJECTIVE * median_low(self._objectives.values)

    def _sample(self, now: EngineSeconds, state: State) -> None:
        queues = {name: state.queue_seconds(name, now) for name in state.fleet.ready}
        if len(queues) < 2 or not any(queues.values()):
            return
        self._samples += 1
        longest, shortest = max(queues, key=queues.__getitem__), min(queues, key=queues.__getitem__)
        long = min(queues[longest], self._waiting(longest, state)) > self._bound
        if long and queues[shortest] < IDLE_SECONDS:
            self._uneven += 1
            self._longest[longest] += 1
            self._idle[shortest] += 1

    def _waiting(self, name: InstanceId, state: State) -> EngineSeconds:
        """Work at an instance without that of its longest request."""
        queue = state.workload.queues.get(name, EMPTY_QUEUE)
        requests = [
            r
            for r in (*queue.prefill.values(), *queue.pending.values())
            if not (self._gathers_late and r.placed_at + r.predicted_ttft > r.deadline)
        ]
        work = [request.prefill_seconds for request in requests]
        longest = max(work, default=0.0)
        tokens = sum(request.uncached_tokens for request in requests)
        return state.latency.expected_seconds(name, sum(work) - longest, tokens)

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        share = self._uneven / self._samples if self._samples else 0.0
        if self._samples >= SAMPLES_MIN and share > UNEVEN_SHARE_MAX:
            yield self.warning(
                f"for {share:.0%} of the busy time one queue was longer than {self._bound:.1f} s while another was empty",
                [
                    f"longest: {name}, {count / self._uneven:.0%} of that time"
                    for name, count in self._longest.most_common(3)
                ]
                + [
                    f"idle: {name}, {count / self._uneven:.0%} of that time"
                    for name, count in self._idle.most_common(3)
                ],
                advice_for(Cause.BUSY_INSTANCE),
            )
