"""Reinforcement learning on learned world models, corrected by a few real executions."""

__version__ = "0.1.0"
