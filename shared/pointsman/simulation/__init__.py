"""The fleet in virtual time: engine model, workloads, and a simulator that drives the production state and policies."""
