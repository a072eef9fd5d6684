"""The laboratory: experiments of the authors. Production code never imports it."""
