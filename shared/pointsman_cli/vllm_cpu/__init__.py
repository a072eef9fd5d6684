"""A real engine without an accelerator: vLLM's CPU build and a small real model, in an environment of their own.

`home`: where it lies and how it starts; `recipe`: the steps that make it; `machine`: requirements; `checkpoint`: conversion
of the model, run in the engine's environment. The others need only Python: `deploy/engines/vllm-cpu/vllm-cpu` runs them
from a bare checkout.
"""
