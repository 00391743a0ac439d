"""Runs plans on vLLM: the engine, one request's session, and how its answer is sent."""
