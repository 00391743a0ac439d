"""Traffic for `make loadtest`: made prompts and traces, and the operator's own log."""
