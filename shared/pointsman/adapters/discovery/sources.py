"""Which source a text of `--discover` names."""

from pointsman.ports import EngineDiscovery

FORMS = "file:PATH, dns:HOST:PORT, srv:NAME, docker:[LABEL=VALUE] or kubernetes:[NAMESPACE/]SELECTOR"


def source_of(text: str) -> EngineDiscovery:
    """Raises ValueError. A source's library is imported where the source is used."""
    scheme, _, rest = text.partition(":")
    match scheme:
        case "file":
            from pointsman.adapters.discovery.file import FileDiscovery

            return FileDiscovery(rest)
        case "dns":
            from pointsman.adapters.discovery.dns import AddressDiscovery

            return AddressDiscovery(rest)
        case "srv":
            from pointsman.adapters.discovery.dns import ServiceDiscovery

            return ServiceDiscovery(rest)
        case "docker":
            from pointsman.adapters.discovery.docker import DockerDiscovery

            return DockerDiscovery(rest)
        case "kubernetes":
            from pointsman.adapters.discovery.kubernetes import KubernetesDiscovery

            return KubernetesDiscovery(rest)
        case _:
            raise ValueError(f"'{text}' is no source of engines: {FORMS}")
