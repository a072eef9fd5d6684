"""Defects of the kinds that reviewers plant, each as a change of source: `python -m pointsman_lab.torture.planted` tells which unit
test and which seed of torture finds each (docs/testing.md has the table)."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from pointsman_lab.torture.mutation import LIBRARIES, Mutant, Outcome, judge

SEEDS = (*range(1, 21), 33, 60, 82)
"""The last three have one bad engine: slow, hanging, answering 500."""
DISPATCH = "shared/pointsman/policies/dispatch/"
STATE = "shared/pointsman/state/state.py"
WORKLOAD = "shared/pointsman/state/workload.py"
FLEET = "shared/pointsman/state/fleet.py"
OUTLIERS = "shared/pointsman/policies/outliers.py"
ATTEMPTS = "shared/pointsman/state/outliers.py"
TRANSLATOR = "services/worker/pointsman_worker/translator.py"


@dataclass(frozen=True, slots=True)
class Defect:
    name: str
    file: str
    before: str
    """Must be in the file once."""
    after: str


DEFECTS = (
    Defect(
        "an engine that failed may be tried again",
        DISPATCH + "placement.py",
        "return PoolView(known, request, turn.now, excluded=excluded)\n",
        "return PoolView(known, request, turn.now)\n",
    ),
    Defect(
        "a window is kept after a cancel",
        WORKLOAD,
        "            self.line(known.instance).remove(known)\n",
        "            _ = known.stage is Stage.PREFILL or self.line(known.instance).remove(known)\n",
    ),
    Defect(
        "a cancel grants nothing to those who wait",
        DISPATCH + "granting.py",
        "        _cancel(turn, request, cause, reason, sent_to=NO_INSTANCE)\n        grant_next(turn, instance)\n",
        "        _cancel(turn, request, cause, reason, sent_to=NO_INSTANCE)\n",
    ),
    Defect(
        "a gap leaves `exact`",
        STATE,
        '                    instance_missing.doubt = f"engine events missed: {event.reason}"\n',
        "                    pass\n",
    ),
    Defect(
        "`unknown` caches are `exact`",
        FLEET,
        '        if self.cache == "unknown":\n',
        '        if self.cache == "unheard":\n',
    ),
    Defect(
        "one more than `running_max`",
        WORKLOAD,
        "if len(self.prefill) + len(self.decoding) >= running_max:",
        "if len(self.prefill) + len(self.decoding) > running_max:",
    ),
    Defect(
        "those who decode do not count in `running_max`",
        WORKLOAD,
        "if len(self.prefill) + len(self.decoding) >= running_max:",
        "if len(self.prefill) >= running_max:",
    ),
    Defect(
        "a promise is released twice",
        STATE,
        '        """Release a promise, unless the instance has started again since and forgot it."""\n',
        "        self.speculation.release(instance, keys)\n",
    ),
    Defect(
        "the role of an instance is not looked at",
        FLEET,
        '[instance for instance in present if instance.role != "decode"]',
        "present",
    ),
    Defect(
        "an adapter is not asked for",
        FLEET,
        "            (not adapter or adapter in self.adapters)\n",
        "            True\n",
    ),
    Defect(
        "what waits at a draining instance is granted there",
        DISPATCH + "fleet_care.py",
        "    relocate_pending(turn)\n\n\ndef undrain",
        "\n\ndef undrain",
    ),
    Defect(
        "a draining instance takes requests",
        FLEET,
        "            return Status.DRAINING\n        return Status.EJECTED",
        "            return Status.READY\n        return Status.EJECTED",
    ),
    Defect(
        "a probe of an earlier life counts",
        STATE,
        "instance_probed = self._current(event.instance, event.epoch)",
        "instance_probed = self.fleet.get(event.instance)",
    ),
    Defect(
        "a hit is one block too long",
        STATE,
        "        self.delivered.extend_hits(keys, hits)\n        return hits",
        "        self.delivered.extend_hits(keys, hits)\n        return {i: min(len(keys), n + 1) for i, n in hits.items()}",
    ),
    Defect(
        "the last token counts as cached",
        STATE,
        "usable = (prompt_tokens - 1) //",
        "usable = prompt_tokens //",
    ),
    Defect(
        "the queue keeps the seconds of who left it",
        WORKLOAD,
        "max(0.0, self.pending_seconds - request.prefill_seconds) if self.pending else 0.0",
        "self.pending_seconds if self.pending else 0.0",
    ),
    Defect(
        "the queue keeps the tokens of who left it",
        WORKLOAD,
        "        self.pending_tokens -= request.uncached_tokens\n",
        "",
    ),
    Defect(
        "a re-bound request may be re-bound again",
        "shared/pointsman/policies/rebalancing/redispatch.py",
        "return request.rebind and not request.rebound_from and",
        "return True and",
    ),
    Defect(
        "the quota of a round is not looked at",
        "shared/pointsman/policies/rebalancing/migration_planner.py",
        "while heap and len(moves) < self._bounds.migrations_max:",
        "while heap:",
    ),
    Defect(
        "the budget has the wrong sign",
        "shared/pointsman/policies/pool_view.py",
        "return self.request.deadline - self.now",
        "return self.now - self.request.deadline",
    ),
    Defect(
        "the budget counts from the placement",
        WORKLOAD,
        "return self.arrived_at + self.slo_ttft",
        "return max(self.arrived_at, self.placed_at) + self.slo_ttft",
    ),
    Defect(
        "a draining that nobody needs is undone by a new life",
        FLEET,
        "draining=known.draining if known else False,",
        "draining=False,",
    ),
    Defect(
        "copies of a block are not counted",
        TRANSLATOR,
        "node.copies = max(node.copies, 0) + 1\n            if",
        "node.copies = 1\n            if",
    ),
    Defect(
        "the removal of a parked block is lost",
        TRANSLATOR,
        "            elif self._parked:\n                self._remove_parked(engine_hash)\n",
        "",
    ),
    Defect(
        "a snapshot does not clear",
        STATE,
        "        self.index.clear(event.instance)\n        for run",
        "        for run",
    ),
    Defect(
        "a prefill that ends teaches nothing",
        STATE,
        "            if learnable:\n                self._learn_prefill(request, event.at)\n",
        "",
    ),
    Defect(
        "an ejected instance takes requests",
        FLEET,
        "        return Status.EJECTED if self.ejected else Status.READY\n",
        "        return Status.READY\n",
    ),
    Defect(
        "a new life begins ejected",
        FLEET,
        "            draining=known.draining if known else False,\n",
        "            draining=known.draining if known else False,\n            ejected=known.ejected if known else False,\n",
    ),
    Defect(
        "a half-open instance is tried by as many as come",
        STATE,
        "        since = self.outliers.record(instance).half_open_since\n",
        "        return False\n        since = self.outliers.record(instance).half_open_since\n",
    ),
    Defect(
        "two failures less are enough to be ejected",
        OUTLIERS,
        "        if not 0 < self._settings.consecutive_failures <= count or not recent:\n",
        "        if not 0 < self._settings.consecutive_failures <= count + 2 or not recent:\n",
    ),
    Defect(
        "who is left to serve is not asked for",
        OUTLIERS,
        '        return (prefills or instance.role == "decode") and (decodes or instance.role == "prefill")\n',
        "        return prefills or decodes or True\n",
    ),
    Defect(
        "any share may be ejected",
        OUTLIERS,
        "        return unwell + 1 <= self._settings.max_ejection_share * (unwell + len(self._whole))\n",
        "        return unwell >= 0\n",
    ),
    Defect(
        "an ejection ends a second early",
        OUTLIERS,
        "if self._now >= record.until else None",
        "if self._now >= record.until - self._speed else None",
    ),
    Defect(
        "an ejection does not end",
        OUTLIERS,
        "if self._now >= record.until else None",
        "if self._now >= record.until + 100 * self._speed else None",
    ),
    Defect(
        "a request that fails everywhere ejects",
        ATTEMPTS,
        "        if not given_up and len({failure.instance for failure in failures}) == 1:\n            self._convict(failures[-1])\n",
        "        for failure in failures:\n            self._convict(failure)\n",
    ),
)

TESTS_ELSEWHERE = {
    "shared/pointsman/policies/rebalancing/redispatch.py": ("rebinding", "rebalancing"),
    "shared/pointsman/policies/rebalancing/migration_planner.py": ("rebalancing",),
    "shared/pointsman/policies/pool_view.py": ("routing", "admission"),
    OUTLIERS: ("outliers",),
    ATTEMPTS: ("outliers",),
}


def mutants(root: Path) -> Iterator[tuple[Defect, Mutant]]:
    """Each defect, planted. Asserts that the source still has its place."""
    for defect in DEFECTS:
        source = (root / defect.file).read_text()
        assert source.count(defect.before) == 1, f"{defect.name}: {source.count(defect.before)} places in {defect.file}"
        planted = source.replace(defect.before, defect.after)
        line = source[: source.index(defect.before)].count("\n") + 1
        yield defect, Mutant(defect.file, line, defect.name, defect.before, defect.after, planted)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", default="", help="Part of a defect's name.")
def main(only: str) -> None:
    """Plant each defect, and tell the first unit test and the first seed that find it."""
    root = Path.cwd()
    for name in LIBRARIES:
        importlib.import_module(name)
    for defect, mutant in mutants(root):
        if only in defect.name:
            by_tests = judge(mutant, root, (), tests=TESTS_ELSEWHERE.get(defect.file))
            by_seeds = judge(mutant, root, SEEDS, tests=())
            click.echo(f"{defect.name}\n    tests: {_told(by_tests)}\n    torture: {_told(by_seeds)}")


def _told(outcome: Outcome) -> str:
    return replace(outcome, by=outcome.by.split("::")[-1]).by if outcome.fate != "survived" else "-"


if __name__ == "__main__":
    main()
