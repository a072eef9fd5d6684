"""Who sends a request, by an accepted credential, and what that credential may use."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pointsman.primitives import Tenant
from pointsman_ingress.http.errors import endpoint_out_of_scope, model_out_of_scope


@dataclass(frozen=True, slots=True)
class Identity:
    """`models`: patterns with `*`, `?`, `[...]`; `endpoints`: paths; empty: all."""

    tenant: Tenant
    models: Sequence[str] = ()
    endpoints: Sequence[str] = ()

    def check_endpoint(self, path: str) -> None:
        """Raises ApiError (403)."""
        if self.endpoints and path not in self.endpoints:
            raise endpoint_out_of_scope(path)

    def check_model(self, model: str) -> None:
        """Raises ApiError (403), the same whether or not there is such a model."""
        if not self.may_use(model):
            raise model_out_of_scope(model)

    def may_use(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)
