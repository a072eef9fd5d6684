"""Follows one vLLM engine's KV cache events: ZMQ frames in, ordered batches out, with gaps and restarts marked."""
