"""The recorder service."""
