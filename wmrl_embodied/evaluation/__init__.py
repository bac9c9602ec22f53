"""Statistics, plots and the report of what a run folder or an experiment folder holds."""
