"""Starts, watches and stops a Triton server. Used by ``serve``; Triton itself needs none of it."""
