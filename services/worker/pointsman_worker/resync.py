"""Answers `cmd.resync.<instance>` by a snapshot, a new epoch or a refusal."""

import asyncio
from dataclasses import dataclass

import structlog

from pointsman.contracts.codec import AnyCommand
from pointsman.contracts.commands import ResyncAnswered, ResyncCache, refusal_of
from pointsman.contracts.subjects import resync_subject
from pointsman.ports import Commands, Reply
from pointsman.primitives import WHOLE_MAX, Epoch, PoolName
from pointsman_worker.session import CacheSession, SessionState
from pointsman_worker.writer import LogWriter

log = structlog.get_logger()

SNAPSHOTS_WAITING_MAX = 16
REJOIN_ABOVE_MAX = WHOLE_MAX // 2
"""As many epochs can follow; as Unix milliseconds it is the year 144,000."""


@dataclass(eq=False)
class ResyncHandler:
    commands: Commands
    state: SessionState
    writer: LogWriter

    async def run(self) -> None:
        subject = resync_subject(PoolName(self.state.settings.pool), self.state.instance)
        async with self.commands.serve(subject, self._on_command):
            await asyncio.Event().wait()

    async def _on_command(self, command: AnyCommand, reply: Reply) -> None:
        """Replies after the snapshot is in the log; immediately for a new epoch."""
        state = self.state
        if (unread := refusal_of(command, (ResyncCache,))) is not None:
            await reply(unread)
            return
        if isinstance(command, ResyncCache) and command.epoch and not self._reports_in(command.epoch):
            return  # another worker has the same name
        if isinstance(command, ResyncCache) and command.rejoin and state.session is not None:
            refusal = self._rejoin(command, state.session)
        elif isinstance(command, ResyncCache) and command.distrust:
            refusal = self._refusal(command)
            if not refusal and state.session is not None and state.session.epoch <= command.above:
                state.distrust(command.reason, forget=True)
        else:
            refusal = self._refusal(command) or await self.writer.snapshot()
        await reply(ResyncAnswered(instance=state.instance, accepted=not refusal, detail=refusal))

    def _reports_in(self, epoch: Epoch) -> bool:
        return self.state.session is not None and self.state.session.epoch == epoch

    def _rejoin(self, command: ResyncCache, session: CacheSession) -> str:
        """As `_refusal`."""
        if command.above > REJOIN_ABOVE_MAX:
            return f"epochs are Unix milliseconds, and {command.above} is none that another can follow"
        if session.joined_at:
            log.warning("rejoin_requested", reason=command.reason)
            self.state.last_epoch = max(self.state.last_epoch, command.above)
            self.state.rejoin(session)
        return ""

    def _refusal(self, command: AnyCommand) -> str:
        """Empty: accepted."""
        state = self.state
        if not isinstance(command, ResyncCache) or command.instance != state.instance:
            return f"this is the worker of {state.instance}, and takes ResyncCache only"
        if state.session is None:
            return "the engine does not answer yet"
        if state.session.translator is None:
            return "the engine publishes no events, or none that anybody needs"
        if self.writer.snapshots_waiting >= SNAPSHOTS_WAITING_MAX:
            return f"{SNAPSHOTS_WAITING_MAX} snapshots wait to be written already"
        return ""
