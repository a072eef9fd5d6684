"""What clients saw of each fault, added to the injections."""

from collections import Counter
from http import HTTPStatus

from pointsman.simulation.metrics import percentile
from pointsman_lab.faults.bad_engines import count_touched
from pointsman_lab.faults.clients import Clients, Exchange, first_byte_waits, unserved
from pointsman_lab.faults.injector import Injection
from pointsman_lab.faults.observations import Evidence


def note_service(evidence: Evidence, clients: Clients) -> None:
    injections = sorted(evidence.injections, key=lambda injection: injection.at)
    usual = clients.usual_ttft([injection.at for injection in injections])
    for number, injection in enumerate(injections):
        ends = injections[number + 1].at if number + 1 < len(injections) else float("inf")
        injection.served_s = clients.first_answer_after(injection.at)
        injection.normal_s = clients.normal_after(injection.at, ends, usual=usual)
        injection.streams_cut = clients.cut_between(injection.at, ends)
        _note_answers(injection, clients.between(injection.at, ends))
        if evidence.balancer is not None:
            injection.out_of_rotation = evidence.balancer.out_of_rotation(injection.at, min(ends, injection.ended))
        if injection.touched is not None:
            count_touched(
                injection.touched,
                began=injection.at,
                ended=injection.at + injection.lasted,
                exchanges=evidence.exchanges,
                entries=evidence.entries,
            )


def _note_answers(injection: Injection, exchanges: list[Exchange]) -> None:
    injection.answered = len(exchanges)
    injection.statuses = dict(Counter(str(e.status) for e in exchanges if e.status != HTTPStatus.OK))
    injection.failed = sum(unserved(e) for e in exchanges)
    injection.ttft_p99_s = percentile(first_byte_waits(exchanges), 99)
