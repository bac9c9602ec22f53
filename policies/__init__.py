"""Policies: MiniVLA, and what trains policies from demonstrations."""
