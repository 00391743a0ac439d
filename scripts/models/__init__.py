"""Recipes of the models that set-up builds on this machine."""
