"""HTTP: endpoints, bodies, headers, errors, tenants."""
