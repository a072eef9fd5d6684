"""vLLM's CPU build and a small real model, in an environment of their own. All modules but `checkpoint` need only
Python: `deploy/engines/vllm-cpu/vllm-cpu` runs them from a bare checkout."""
