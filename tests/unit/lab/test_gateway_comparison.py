"""Of several rounds the quietest counts, figure by figure, and ours is compared as a whole."""

from pointsman_lab.gateway.comparison import as_json, goals, quieter
from pointsman_lab.gateway.measurements import Added, Figures, Work


def figures(p50: float, rate: float, **work: tuple[float, float]) -> Figures:
    return Figures(
        added={"small": Added(0.5, 0.5 + p50, p50, 2 * p50, 3 * p50, 10, 0)},
        requests_per_s={"gateway": rate},
        concurrency=64,
        work={name: Work(*both) for name, both in work.items()},
    )


def test_the_lower_latency_and_work_and_the_higher_rate_count() -> None:
    found = quieter(figures(2.0, 900, ingress=(500, 9)), figures(1.0, 800, ingress=(600, 7)))

    assert found.added["small"].added_p50_ms == 1.0
    assert found.added["small"].added_p99_ms == 3.0, "that of the same round"
    assert found.requests_per_s == {"gateway": 900}
    assert found.work["ingress"] == Work(500, 7)


def test_ingress_and_scheduler_together_are_compared_and_a_loss_is_shown() -> None:
    found = {
        "pointsman": figures(2.0, 900, ingress=(200, 5), scheduler=(150, 1)),
        "smg": figures(1.0, 2000, smg=(300, 9)),
        "vllm-router": figures(1.0, 2000, **{"vllm-router": (1, 6)}),
    }

    assert [(goal.other, goal.ours_us, goal.met) for goal in goals(found)] == [
        ("smg", 350, False),
        ("vllm-router", 6, True),
    ]
    assert as_json(found, 3)["goals"][0]["met"] is False
    assert goals({"pointsman": found["pointsman"]}) == []
