"""Alerts and dashboards against the metrics that exist, and against a real Prometheus."""
