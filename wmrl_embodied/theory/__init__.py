"""Estimators judged where everything is known: a softmax bandit with exact gradients and an exact optimum."""
