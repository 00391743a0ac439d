"""Everything that depends on vLLM's inside, behind one version check."""
