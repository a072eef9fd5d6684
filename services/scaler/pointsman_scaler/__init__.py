"""The scaler service."""
