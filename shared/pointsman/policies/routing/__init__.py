"""Routing policies: where a request goes. One file a policy; its docstring gives source, bias and limits."""
