"""Follows one vLLM engine's KV cache events: ZMQ frames in, decoded batches in order out, with gaps and restarts
marked."""
