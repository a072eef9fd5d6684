"""Defects of the kinds that reviewers plant, each as a change of source (docs/testing.md says how many
are found). The text of a defect must be in exactly one file of `mutation.sources`, so that code may move."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pointsman_lab.torture.mutation import Mutant, sources

SEEDS = (*range(1, 21), 33, 60, 82)


@dataclass(frozen=True, slots=True)
class Defect:
    name: str
    before: str
    after: str


DEFECTS = (
    Defect(
        "an engine that failed may be tried again",
        "return PoolView(seen, request, turn.now, excluded=excluded)\n",
        "return PoolView(seen, request, turn.now)\n",
    ),
    Defect(
        "a window is kept after a cancel",
        "            self.queue(known.instance).remove(known)\n",
        "            _ = known.stage is Stage.PREFILL or self.queue(known.instance).remove(known)\n",
    ),
    Defect(
        "a cancel grants nothing to those who wait",
        "        _cancel(turn, request, cause, reason, sent_to=NO_INSTANCE)\n        _grant_after(turn, instance, cause)\n",
        "        _cancel(turn, request, cause, reason, sent_to=NO_INSTANCE)\n",
    ),
    Defect(
        "a gap leaves `exact`",
        '        instance.doubt = f"engine events missed: {event.reason}"\n',
        "",
    ),
    Defect(
        "`unknown` caches are `exact`",
        '        if self.cache == "unknown":\n',
        '        if self.cache == "unheard":\n',
    ),
    Defect(
        "one more than `running_max`",
        "if len(self.prefill) + len(self.decoding) >= running_max:",
        "if len(self.prefill) + len(self.decoding) > running_max:",
    ),
    Defect(
        "those who decode do not count in `running_max`",
        "if len(self.prefill) + len(self.decoding) >= running_max:",
        "if len(self.prefill) >= running_max:",
    ),
    Defect(
        "a promise is released twice",
        "    if parts.current(instance, epoch) is not None:\n        parts.promises.release(instance, keys)\n",
        "    parts.promises.release(instance, keys)\n    parts.promises.release(instance, keys)\n",
    ),
    Defect(
        "the role of an instance is not looked at",
        '[instance for instance in present if instance.role != "decode"]',
        "present",
    ),
    Defect(
        "an adapter is not asked for",
        "            (not adapter or adapter in self.adapters)\n",
        "            True\n",
    ),
    Defect(
        "what waits at a draining instance is granted there",
        "    relocate_pending(turn)\n\n\ndef undrain",
        "\n\ndef undrain",
    ),
    Defect(
        "a draining instance takes requests",
        "            return Status.DRAINING\n        return Status.EJECTED",
        "            return Status.READY\n        return Status.EJECTED",
    ),
    Defect(
        "a probe of an earlier epoch counts",
        "if probed := self.current(event.instance, event.epoch):\n                    probed.parity",
        "if probed := self.fleet.get(event.instance):\n                    probed.parity",
    ),
    Defect(
        "a hit is one block too long",
        "        self.delivered.extend_hits(keys, hits)\n        return hits",
        "        self.delivered.extend_hits(keys, hits)\n        return {i: min(len(keys), n + 1) for i, n in hits.items()}",
    ),
    Defect(
        "the last token counts as cached",
        "usable = (prompt_tokens - 1) // instance.",
        "usable = prompt_tokens // instance.",
    ),
    Defect(
        "the queue keeps the seconds of who left it",
        "max(0.0, self.pending_seconds - request.prefill_seconds) if self.pending else 0.0",
        "self.pending_seconds if self.pending else 0.0",
    ),
    Defect(
        "the queue keeps the tokens of who left it",
        "        self.pending_tokens -= request.uncached_tokens\n",
        "",
    ),
    Defect(
        "a re-bound request may be re-bound again",
        "return request.rebind and not request.rebound_from and",
        "return True and",
    ),
    Defect(
        "the quota of a round is not looked at",
        "while heap and len(moves) < self._limits.migrations_max:",
        "while heap:",
    ),
    Defect(
        "the budget has the wrong sign",
        "return self.request.deadline - self.now",
        "return self.now - self.request.deadline",
    ),
    Defect(
        "the budget counts from the placement",
        "return self.arrived_at + self.slo_ttft",
        "return max(self.arrived_at, self.placed_at) + self.slo_ttft",
    ),
    Defect(
        "an unnecessary drain is undone by a new epoch",
        "draining=known.draining if known else False,",
        "draining=False,",
    ),
    Defect(
        "copies of a block are not counted",
        "node.copies = max(node.copies, 0) + 1\n            if",
        "node.copies = 1\n            if",
    ),
    Defect(
        "the removal of a parked block is lost",
        "            elif self.orphans:\n                self.orphans.remove(engine_hash)\n",
        "",
    ),
    Defect(
        "a snapshot does not clear",
        "    parts.index.clear(event.instance)\n    parts.slower.clear(event.instance)\n    for run",
        "    for run",
    ),
    Defect(
        "a prefill that ends teaches nothing",
        "        if learnable:\n            _learn_prefill(parts, request, event.at, event.prefill)\n",
        "",
    ),
    Defect(
        "an ejected instance takes requests",
        "        return Status.EJECTED if self.ejected else Status.READY\n",
        "        return Status.READY\n",
    ),
    Defect(
        "a new epoch begins ejected",
        "            draining=known.draining if known else False,\n",
        "            draining=known.draining if known else False,\n            ejected=known.ejected if known else False,\n",
    ),
    Defect(
        "a half-open instance is tried by as many as come",
        "    first = parts.outliers.record(instance).trials_from\n",
        "    return False\n    first = parts.outliers.record(instance).trials_from\n",
    ),
    Defect(
        "two failures less are enough to be ejected",
        "        if not 0 < self._settings.consecutive_failures <= count or not recent:\n",
        "        if not 0 < self._settings.consecutive_failures <= count + 2 or not recent:\n",
    ),
    Defect(
        "who is left to serve is not asked for",
        '        return (prefills or self.role == "decode") and (decodes or self.role == "prefill")\n',
        "        return prefills or decodes or True\n",
    ),
    Defect(
        "any share may be ejected",
        "        return ejected + 1 <= self._settings.max_ejection_share * (ejected + len(self._healthy))\n",
        "        return ejected >= 0\n",
    ),
    Defect(
        "an ejection ends a second early",
        "            over = self._now >= record.until or",
        "            over = self._now >= record.until - self._speed or",
    ),
    Defect(
        "an ejection does not end",
        "            over = self._now >= record.until or",
        "            over = self._now >= record.until + 100 * self._speed or",
    ),
    Defect(
        "a request that fails everywhere ejects",
        "        if not cancelled and len({failure.instance for failure in failures}) == 1:\n"
        "            self._convict(self.accused(failures[-1]) or failures[-1])\n",
        "        for failure in failures:\n            self._convict(failure)\n",
    ),
)


def planted(root: Path, only: str = "") -> Iterator[Mutant]:
    """The mutants of the defects whose name contains `only`. Raises LookupError unless a text is in exactly one place."""
    texts = sources(root)
    for defect in DEFECTS:
        if only not in defect.name:
            continue
        places = [(file, text) for file, text in texts.items() for _ in range(text.count(defect.before))]
        if len(places) != 1:
            raise LookupError(f"{defect.name}: in {len(places)} places: {defect.before!r}")
        file, text = places[0]
        line = text[: text.index(defect.before)].count("\n") + 1
        changed = text.replace(defect.before, defect.after)
        yield Mutant(file, line, defect.name, defect.before, defect.after, changed)
