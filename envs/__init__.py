"""Environments: Meta-World, its listed initial states, worker processes, demonstrations."""
