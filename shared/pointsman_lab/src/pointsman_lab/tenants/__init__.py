"""Limits, priorities and fairness of tenants, measured on real processes."""
