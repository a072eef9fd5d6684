"""Fleet events of one instance: combines target, settings, session and monitor into InstanceJoined and InstanceReported."""

from dataclasses import dataclass
from typing import cast

import msgspec

from pointsman.adapters.calibration_file import Calibration
from pointsman.contracts.fleet import InstanceJoined, InstanceReported, Role
from pointsman.primitives import EngineSeconds
from pointsman.state.engine_profiles import PROFILES
from pointsman_worker.engine_monitor import EngineMonitor
from pointsman_worker.session import CacheSession, SessionState


@dataclass(frozen=True, slots=True)
class FleetEvents:
    state: SessionState
    monitor: EngineMonitor
    calibration: Calibration | None

    def joined(self, session: CacheSession) -> InstanceJoined:
        state, facts, names = self.state, session.facts, self.monitor.names
        settings, target, measured = state.settings, state.target, self.calibration
        profile = PROFILES[target.engine_model]
        return InstanceJoined(
            at=state.clock.now(),
            instance=state.instance,
            epoch=session.epoch,
            url=target.advertised_url or target.url,
            model=facts.model,
            block_tokens=settings.block_tokens,
            engine_block_tokens=facts.block_tokens or settings.block_tokens,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            max_model_len=facts.max_model_len,
            prefill=measured.prefill if measured else profile.prefill_cost,
            speed=settings.speed,
            engine_version=facts.version,
            cache=session.cache,
            dp_rank=target.rank,
            role=cast("Role", target.role),
            decode=measured.decode if measured else profile.decode_cost,
            transfer_tokens_per_s=settings.kv_transfer_gb_per_s * 1e9 / profile.kv_bytes_per_token,
            adapters=list(names.adapters),
            aliases=list(names.aliases),
            completes=facts.completes,
            certain=state.certain(session),
            role_switching=settings.role_switching,
            fetches=settings.fetches and target.role == "both",
            cache_detail=session.detail if session.cache == "unknown" else "",
            shared_store=settings.shared_kv_store,
        )

    def reported(self, session: CacheSession, *, back_within: EngineSeconds = 0.0) -> InstanceReported:
        state, load, names, translator = self.state, self.monitor.load, self.monitor.names, session.translator
        return InstanceReported(
            at=state.clock.now(),
            instance=state.instance,
            epoch=session.epoch,
            serving=state.serving,
            waiting=load.waiting,
            running=load.running,
            kv_usage=load.kv_usage,
            sequence=session.sequencer.sequence,
            blocks=translator.device.keys.count if translator else 0,
            digest=translator.device.keys.digest if translator else 0,
            tiers=translator.digests if translator else [],
            undecodable=state.undecodable,
            adapters=list(names.adapters),
            aliases=list(names.aliases),
            certain=state.certain(session),
            back_within=back_within,
        )

    def identity(self, session: CacheSession) -> bytes:
        """The join event without fields that reports repeat."""
        joined = msgspec.structs.replace(self.joined(session), at=0.0, adapters=[], aliases=[], certain=True)
        return msgspec.json.encode(joined)
