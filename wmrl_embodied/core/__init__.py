"""The method. Knows no simulator, robot or language model; torch, numpy and scikit-learn only."""
