"""What a run needs around the trainer: checkpoints, logging, worker pools."""
