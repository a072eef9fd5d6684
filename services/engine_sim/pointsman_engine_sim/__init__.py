"""A simulated vLLM engine: vLLM's HTTP and KV events around `simulation.engine_model` on a scaled clock."""
