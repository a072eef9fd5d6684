"""How a process lives: settings, supervision, telemetry, health, shutdown, and the embedded nats-server."""
