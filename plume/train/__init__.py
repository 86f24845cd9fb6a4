"""Training: objectives, optimisers, the one loop, checkpoints, many ranks, pretraining."""
