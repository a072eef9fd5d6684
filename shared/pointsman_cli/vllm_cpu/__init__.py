"""A real engine for machines without an accelerator: vLLM's CPU build and a small real model, in a place of their own.

`home` is where they lie and how an engine is started from there, `recipe` the steps that make them, `machine` what must
be true of the machine first, `checkpoint` the model's conversion (run by the environment's own Python), `__main__` the
command `python -m pointsman_cli.vllm_cpu`. But for `checkpoint` this needs nothing but Python, so that
`deploy/engines/vllm-cpu/vllm-cpu` runs it from a checkout where nothing is installed.
"""
