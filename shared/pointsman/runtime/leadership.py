"""Leader election by a lease. Clocks are not compared: a leader measures from before its write, a watcher from after it
saw a new revision; the margin keeps both from acting at once. If that fails (process suspended, record lost) terms
protect the log: see `ports.Fence` and `State.apply`. The election itself (LeaderElected, fence) is in
`pointsman_scheduler/leader.py`, the lease record in `adapters/jetstream/lease.py`."""

from collections.abc import Callable

import structlog

from pointsman.ports import Clock, Lease, LeaseTakenError, StoreUnavailableError, Tenure
from pointsman.primitives import Term, WallSeconds

log = structlog.get_logger()

LOOKS_PER_LEASE = 8
LISTENING_SHARE = 0.5
"""Share of the lease: a longer pause between reads restarts the watcher's count."""
RENEWALS_PER_LEASE = 4
TROUBLE_LOG_SECONDS: WallSeconds = WallSeconds(5.0)
ACTING_SHARE = 0.75
"""Share of the lease for which a leader acts after a renewal."""


class Leadership:
    def __init__(self, lease: Lease, clock: Clock, *, name: str, lease_seconds: WallSeconds) -> None:
        """`name`: unique for all time. `lease_seconds`: wall seconds, equal for the whole pool."""
        self._lease = lease
        self._clock = clock
        self._name = name
        self._lease_seconds = lease_seconds
        self._tenure: Tenure | None = None
        self._acts_until = WallSeconds(0.0)
        self._resigned = False
        self._newest = Term(0)
        """Latest term seen; lease and log may have lost it since."""
        self.leader = ""
        self.trouble = ""
        """Why the lease cannot be read or written; empty if it can."""
        self._told, self._told_at = "", -TROUBLE_LOG_SECONDS

    @property
    def holds(self) -> bool:
        return not self._resigned and self._tenure is not None and self._clock.wall() < self._acts_until

    async def obtain(self, *, term_of_log: Callable[[], Term | None]) -> None:
        """Wait for a free lease and take it. `term_of_log`: None while unknown."""
        seen: Tenure | None = None
        seen_at = looked_at = -self._lease_seconds
        while True:
            try:
                found = await self._lease.look()
            except StoreUnavailableError as error:
                self._note(error)
            else:
                listened = self._clock.wall() - looked_at < LISTENING_SHARE * self._lease_seconds
                looked_at = self._clock.wall()
                if not listened or found != seen:
                    seen, seen_at = found, looked_at
                    self.leader = found.holder if found else ""
                known_term = term_of_log()
                self._newest = max(self._newest, found.term if found else Term(0), known_term or Term(0))
                if known_term is not None and self._is_free(found, known_term, seen_at) and not self._resigned:
                    if found is not None and found.holder not in ("", self._name):
                        log.warning("lease_expired", leader=found.holder, seconds=self._lease_seconds)
                    if await self._take(found):
                        return
                else:
                    self.trouble = ""
            await self._clock.sleep_wall(self._lease_seconds / LOOKS_PER_LEASE)

    async def keep(self, *, deposed: Callable[[], str]) -> str:
        """Renew until lost; returns the reason. `deposed`: returns why this process must not lead, or ""."""
        while True:
            await self._clock.sleep_wall(self._lease_seconds / RENEWALS_PER_LEASE)
            reason = deposed() or await self._renew()
            if reason and not self._resigned:
                self._acts_until = WallSeconds(0.0)
                return reason

    def term_above(self, term_of_log: Term) -> Term:
        assert self._tenure is not None
        self._newest = Term(max(self._newest, self._tenure.term, term_of_log + 1))
        return self._newest

    async def resign(self) -> None:
        """Release the lease, and take it no more."""
        self._resigned = True
        await self.release()

    async def release(self) -> None:
        """Release the lease, if ours, for another process."""
        if self._tenure is None:
            return
        try:
            found = await self._lease.look()
            if found is not None and found.holder == self._name:
                await self._lease.put("", found.term, after=found.revision)
        except (LeaseTakenError, StoreUnavailableError) as error:
            log.warning("lease_release_failed", reason=str(error))
        self._tenure = None

    def _is_free(self, found: Tenure | None, known_term: Term, seen_at: WallSeconds) -> bool:
        if found is None and known_term == 0:
            return True  # there was never a leader
        if found is not None and found.holder in ("", self._name):
            return True
        return self._clock.wall() - seen_at >= self._lease_seconds

    async def _take(self, found: Tenure | None) -> bool:
        asked_at = self._clock.wall()
        try:
            tenure = await self._lease.put(self._name, Term(self._newest + 1), after=found.revision if found else 0)
        except LeaseTakenError:
            return False
        except StoreUnavailableError as error:
            self._note(error)
            return False
        self._hold(tenure, asked_at)
        return True

    async def _renew(self) -> str:
        tenure = self._tenure
        if tenure is None or self._resigned:
            return "it was given back"
        asked_at = self._clock.wall()
        try:
            if asked_at >= self._acts_until:
                return await self._look_again(tenure)
            self._hold(await self._lease.put(self._name, tenure.term, after=tenure.revision), asked_at)
        except LeaseTakenError:
            return await self._look_again(tenure)
        except StoreUnavailableError as error:
            self._note(error)  # `holds` runs out by itself; no other process can take it either
        return ""

    async def _look_again(self, tenure: Tenure) -> str:
        """Still ours: a write with a lost answer, or a record lost with its server within our time."""
        asked_at = self._clock.wall()
        try:
            found = await self._lease.look()
            if found is None and asked_at < self._acts_until:
                self._hold(await self._lease.put(self._name, tenure.term, after=0), asked_at)
            elif found is None or (found.holder, found.term) != (self._name, tenure.term):
                return f"the lease is held by {found.holder or 'nobody'}" if found else "the lease is gone"
            else:
                self._hold(await self._lease.put(self._name, tenure.term, after=found.revision), asked_at)
        except LeaseTakenError:
            return "somebody else took the lease"
        except StoreUnavailableError as error:
            self._note(error)
        return ""

    def _note(self, error: StoreUnavailableError) -> None:
        self.trouble, now = str(error), self._clock.wall()
        if self.trouble != self._told and now - self._told_at >= TROUBLE_LOG_SECONDS:
            self._told, self._told_at = self.trouble, now
            log.warning("lease_unavailable", reason=self.trouble)

    def _hold(self, tenure: Tenure, asked_at: WallSeconds) -> None:
        self.trouble = self._told = ""
        if not self._resigned:
            self._tenure, self._newest = tenure, max(self._newest, tenure.term)
            self._acts_until = asked_at + ACTING_SHARE * self._lease_seconds
            self.leader = self._name
