"""Implementations of `ports.InstanceProvider`: processes, containers, pods, or operators."""
