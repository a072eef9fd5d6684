"""Process runtime: settings, supervision, telemetry, health, shutdown, and the embedded nats-server."""
