"""Learned models of dynamics and of the score of a whole attempt."""
