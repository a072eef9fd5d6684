"""What all requests of an ingress share."""

from dataclasses import dataclass

from pointsman.contracts.cache_salts import CacheSalts
from pointsman.ports import Clock
from pointsman.runtime.supervision import Supervisor
from pointsman.runtime.tenant_policies import FollowedPolicies
from pointsman.runtime.tracing import Tracer
from pointsman_ingress.engine.client import EngineClient
from pointsman_ingress.http.authentication import Authentication
from pointsman_ingress.http.call import BodyBudget, RequestIds
from pointsman_ingress.settings import IngressSettings
from pointsman_ingress.work_threads import WorkThreads


@dataclass(frozen=True, kw_only=True)
class IngressParts:
    """`salts`: None without authentication: clients are the operator's own."""

    settings: IngressSettings
    clock: Clock
    supervisor: Supervisor
    authentication: Authentication
    salts: CacheSalts | None
    policies: FollowedPolicies
    engines: EngineClient
    work: WorkThreads
    ids: RequestIds
    bodies: BodyBudget
    tracer: Tracer | None
