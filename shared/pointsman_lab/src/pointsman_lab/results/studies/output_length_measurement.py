"""How well the length of an answer is predicted when its request arrives (`state/output_lengths.py`). Apart from placement,
so that the answers are learned in the order of arrival."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from pointsman.primitives import Tenant
from pointsman.state.output_lengths import OutputLengths
from pointsman_cli.simulate.experiment import Source, requests_of
from pointsman_lab.results.studies.rows import Workloads, short

REQUESTS, NOT_COUNTED = 3000, 500
IN_FLIGHT = 100
"""Answers that have not finished when a request arrives."""
OUTPUT_TOKENS_MAX = 8192
"""What every client asks for."""
GENERATED = ("chat", "rag", "agent_loops", "mixed_day")


def output_lengths(traces: Path) -> Mapping[str, float]:
    """By workload: predicted over generated tokens (all answers together), and the mean absolute error over the mean answer,
    of the prediction and of the mean of all answers so far."""
    workloads = Workloads(traces)
    sources = [workloads.conversation(REQUESTS), workloads.tools(REQUESTS)]
    sources += [workloads.generated(name, REQUESTS) for name in GENERATED]
    return {
        f"{short(source)}{' (trace)' if source.trace else ''}, {name}": value
        for source in sources
        for name, value in _errors(source).items()
    }


def _errors(source: Source) -> dict[str, float]:
    requests = requests_of(source, 0)
    lengths = OutputLengths()
    predicted, mean, actual = [], [], []
    total = 0
    for number, request in enumerate(requests):
        finished = number - IN_FLIGHT
        if finished >= 0:
            answer = requests[finished]
            total += answer.output_tokens
            lengths.learn(Tenant(answer.tenant), answer.output_tokens, OUTPUT_TOKENS_MAX)
        if number >= NOT_COUNTED:
            predicted.append(lengths.expected(Tenant(request.tenant), OUTPUT_TOKENS_MAX))
            mean.append(total / (finished + 1))
            actual.append(request.output_tokens)
    return {
        "answer": fmean(actual),
        "of generated": sum(predicted) / sum(actual),
        "error": _error(predicted, actual),
        "error of the mean": _error(mean, actual),
    }


def _error(predicted: Sequence[float], actual: Sequence[int]) -> float:
    return fmean(abs(ours - real) for ours, real in zip(predicted, actual, strict=True)) / fmean(actual)
