"""Isolation of cache groups: from keys and cached tokens alone, without trust in what imposed the salts. A key stands for
all tokens before it, so groups with salts of their own share none, and an engine's hits are explained by earlier
prompts of the same group. Not seen: a hit of less than one key's tokens beside own prompts of the group."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from typing_extensions import override

from pointsman.contracts.block_keys import unpack_keys
from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted
from pointsman.contracts.fleet import InstanceJoined
from pointsman.contracts.requests import RequestArrived, RequestFinished, cached_of_keys
from pointsman.primitives import Answers, RequestId, Tokens
from pointsman.state.state import PoolSettings, State
from pointsman_cli.doctor.examination import Examiner
from pointsman_cli.doctor.findings import Finding
from pointsman_cli.doctor.request_ends import Ended
from pointsman_cli.formatting import plural
from pointsman_cli.options import as_given

KEYS_MAX = 500_000
"""Remembered keys, some 60 MB. Later prompts are compared with these only."""
IN_FLIGHT_MAX = 20_000
SHOWN_MAX = 8
ADVICE = (
    "A tenant was served from another's prompts, or could have been. Stop the ingress that sent them, compare --secret and "
    "the versions of all ingresses and workers, and clear the engines' prefix caches. `pointsman explain{given}` shows a request."
)


@dataclass(slots=True)
class _Prompt:
    group: int
    keys: "array[int]"
    answers: Answers
    grants: int = 0


class Isolation(Examiner):
    area = "isolation"

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(settings)
        self._groups: dict[str, int] = {}
        self._prompts_of: dict[int, int] = {}
        self._group_of: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        """Arrivals with the key, by key, if more than one."""
        self._reach: dict[int, Tokens] = {}
        """Tokens of prompt and answer that an engine may hold of requests whose prompts end with the key."""
        self._prompts: dict[RequestId, _Prompt] = {}
        self._shared: list[str] = []
        self._shared_keys = 0
        self._unexplained: list[str] = []
        self._unexplained_count = 0
        self._checked = 0
        self._unprovable = ""

    @property
    def _on(self) -> bool:
        return any(self._groups)

    @override
    def begin(self, state: State, *, blind: bool) -> None:
        if blind or state.sequence:
            self._doubt("the log has lost its beginning, and with it earlier prompts")

    @override
    def before(self, event: LogEvent, state: State) -> None:
        match event:
            case RequestArrived():
                self._arrive(event)
            case RequestGranted() if (prompt := self._prompts.get(event.request)) is not None:
                prompt.grants += event.stamp is not None
            case InstanceJoined() if event.cache == "unknown":
                self._doubt(f"{event.instance} joined with a cache of unknown contents")
            case _:
                pass

    @override
    def ended(self, end: Ended, state: State) -> None:
        if isinstance(end.event, RequestFinished):
            self._finish(end.event)
        else:
            self._prompts.pop(end.event.request, None)

    @override
    def summary(self) -> Iterator[str]:
        if not self._on:
            return
        crossed = self._shared_keys or self._unexplained_count
        result = "hits crossed cache groups" if crossed else "no cache hit crossed cache groups"
        proof = (
            f"no block key in two of them, and the cached tokens of {plural(self._checked, 'request')} explained by "
        )
        reason = f" (of hits unproven: {self._unprovable})" if self._unprovable else ""
        groups = plural(len(self._groups), "cache group")
        yield f"isolation: {result}: {groups}" + ("" if crossed else f", {proof}their own group's prompts{reason}")

    @override
    def findings(self, state: State) -> Iterator[Finding]:
        if not self._on:
            return
        if self._shared_keys:
            what = f"{plural(self._shared_keys, 'block key')} occurred in prompts of two cache groups"
            yield self.serious(what, self._shared, ADVICE.format(given=as_given()))
        elif self._unexplained_count:
            what = f"{plural(self._unexplained_count, 'request')} hit cached tokens that no prompt of their cache group explains"
            yield self.serious(what, self._unexplained, ADVICE.format(given=as_given()))

    def _arrive(self, event: RequestArrived) -> None:
        if event.request in self._prompts:
            return
        self._prompts.pop(event.instead_of, None)
        group = self._groups.setdefault(event.cache_group, len(self._groups))
        self._prompts_of[group] = self._prompts_of.get(group, 0) + 1
        if not event.exact:
            self._doubt(f"the tokens of {event.request} were guessed")
        keys = array("Q", unpack_keys(event.keys))
        if event.answers > 1 and event.prompt_tokens // self.settings.block_tokens > len(keys):
            self._doubt(f"{event.request} has several prompts, and the log has the keys of the first")
        for key in keys:
            self._use(key, group, event)
        if len(self._prompts) < IN_FLIGHT_MAX:
            self._prompts[event.request] = _Prompt(group, keys, event.answers)

    def _use(self, key: int, group: int, event: RequestArrived) -> None:
        first = self._group_of.get(key)
        if first is None:
            if len(self._group_of) < KEYS_MAX:
                self._group_of[key] = group
            else:
                self._doubt("it has more prompts than are remembered")
        elif first == group:
            self._uses[key] = self._uses.get(key, 1) + 1
        else:
            self._shared_keys += 1
            if len(self._shared) < SHOWN_MAX:
                names = list(self._groups)
                self._shared.append(f"{key:016x}: of '{names[first]}', then in {event.request} of '{names[group]}'")

    def _finish(self, event: RequestFinished) -> None:
        prompt = self._prompts.pop(event.request, None)
        if prompt is None:
            self._doubt(f"{event.request} has no arrival in the log")
            return
        others = self._prompts_of[prompt.group] > 1
        cached = cached_of_keys(event, prompt.answers)
        if cached >= 0 and prompt.grants <= 1 and not self._unprovable and self._on:
            self._checked += 1
            explained = self._explained(prompt) if others else 0
            if cached > explained:
                self._unexplained_count += 1
                if len(self._unexplained) < SHOWN_MAX:
                    self._unexplained.append(
                        f"{event.request} of '{list(self._groups)[prompt.group]}' on {event.instance}: "
                        f"{cached:,} tokens cached, at most {explained:,} explained"
                    )
        end = prompt.keys[-1] if prompt.keys else None
        if end in self._group_of:  # others are not looked up
            whole = max(0, event.prompt_tokens) + max(0, event.completion_tokens)
            self._reach[end] = max(whole, self._reach.get(end, 0))

    def _explained(self, prompt: _Prompt) -> Tokens:
        """By other prompts of the group with the same first keys, and by the answers to them."""
        width = self.settings.block_tokens
        matched, reach = 0, 0
        for key in prompt.keys:
            if self._group_of.get(key) != prompt.group or self._uses.get(key, 1) < 2:
                break
            matched += 1
            reach = max(reach, self._reach.get(key, 0))
        return max((matched + 1) * width - 1, reach + width - 1 if reach else 0)

    def _doubt(self, reason: str) -> None:
        self._unprovable = self._unprovable or reason
