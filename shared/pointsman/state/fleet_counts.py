"""What a fleet counts over its instances, kept by what changes, since counting all anew at each join takes seconds where
thousands join: the model of most instances, and how many of a model fetch prefixes or do only a part of a request."""

from collections import Counter
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pointsman.primitives import Epoch, InstanceId, Tokens

Votes = dict[str, dict[InstanceId, Epoch]]
"""By model, its instances and since when each has served it."""


class Share(NamedTuple):
    """What one instance adds."""

    model: str
    model_since: Epoch
    counted: bool
    """It counts for the model of the pool before those that do not."""
    kv_capacity_tokens: Tokens
    fetches: bool
    takes_part: bool
    """It only prefills or only decodes."""


class FleetCounts:
    def __init__(self) -> None:
        self.kv_capacity_tokens: Tokens = 0
        self.fetching = Counter[str]()
        self.taking_part = Counter[str]()
        """By model."""
        self._shares: dict[InstanceId, Share] = {}
        self._counted, self._all = ModelVotes(), ModelVotes()

    @property
    def model(self) -> str:
        """Of most counted instances, or of most if none is counted; empty: there are none."""
        return self._counted.model if self._counted else self._all.model

    def put(self, name: InstanceId, share: Share | None) -> None:
        """Replaces what the instance adds. None: it left."""
        before = self._shares.pop(name, None)
        if before is not None:
            self._add(before, -1)
            self._all.remove(name, before.model)
            if before.counted:
                self._counted.remove(name, before.model)
        if share is not None:
            self._shares[name] = share
            self._add(share, 1)
            self._all.add(name, share)
            if share.counted:
                self._counted.add(name, share)

    def _add(self, share: Share, times: int) -> None:
        self.kv_capacity_tokens += times * max(0, share.kv_capacity_tokens)
        for counter, counts in ((self.fetching, share.fetches), (self.taking_part, share.takes_part)):
            if counts:
                counter[share.model] += times
                if not counter[share.model]:
                    del counter[share.model]


class ModelVotes:
    """`model`: of most instances. Ties go to the model served longest, then by the instance's name."""

    def __init__(self) -> None:
        self.model = ""
        self._votes: Votes = {}

    def __bool__(self) -> bool:
        return bool(self._votes)

    def add(self, name: InstanceId, share: Share) -> None:
        self._votes.setdefault(share.model, {})[name] = share.model_since
        self.model = self._first({self.model, share.model} & self._votes.keys())

    def remove(self, name: InstanceId, model: str) -> None:
        del self._votes[model][name]
        if not self._votes[model]:
            del self._votes[model]
        if model == self.model:
            self.model = self._first(self._votes.keys())

    def _first(self, models: AbstractSet[str]) -> str:
        most = max((len(self._votes[model]) for model in models), default=0)
        tied = [model for model in models if len(self._votes[model]) == most]
        if len(tied) == 1:
            return tied[0]
        ranked = ((since, name, model) for model in tied for name, since in self._votes[model].items())
        return min(ranked, default=(0, "", ""))[-1]
