"""DSpark: plans requests and (in vLLM's worker) decides when guessing pays. Pure Python."""
