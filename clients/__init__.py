"""Clients of the ensemble, over Triton's own doors. They need nothing but ``tritonclient``."""
