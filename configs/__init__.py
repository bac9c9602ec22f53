"""Hydra configuration groups, and one file a command; found as `pkg://wmrl_embodied.configs`."""
