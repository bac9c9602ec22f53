"""Reinforcement learning on learned world models, corrected by a few real executions."""
