"""vLLM's CPU build and a small real model, in an environment of their own. Needs only Python, but for `checkpoint`."""
