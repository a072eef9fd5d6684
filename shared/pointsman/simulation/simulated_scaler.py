"""The scaler of a simulated split pool: each second the production policy sizes the roles of a fixed number of
instances, and those that are to change drain for it. In: the pool's State. Out: its decisions."""

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.fleet import InstanceRoleChanged
from pointsman.policies.scaling import Limits
from pointsman.policies.scaling.decider import Decider, wanted_roles
from pointsman.policies.scaling.roles import role_switches
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.primitives import EngineSeconds
from pointsman.simulation.simulated_pool import SimulatedPool

TICK_SECONDS: EngineSeconds = 1.0


class SimulatedScaler:
    def __init__(self, pool: SimulatedPool) -> None:
        size = pool.scenario.instances
        self._pool = pool
        self._decider = Decider(policy=SloAttainment(), limits=Limits(lowest=size, highest=size), scaler="simulated")

    def tick(self, now: EngineSeconds) -> list[LogEvent]:
        pool, state, dispatcher = self._pool, self._pool.state, self._pool.dispatcher
        decision = self._decider.decide(state, now)
        if decision is not None:
            pool.apply(decision, now)
        events: list[LogEvent] = []
        for switch in role_switches(state, wanted_roles(state)):
            if switch.undo:
                events += dispatcher.undrain(switch.instance, now)
            else:
                events += dispatcher.drain(switch.instance, "its role changes", now, becomes=switch.role)
        events += dispatcher.change_roles(now)
        changed = [event for event in events if isinstance(event, InstanceRoleChanged)]
        pool.outcome.role_changes += [(now, event.instance, event.role) for event in changed]
        return events
