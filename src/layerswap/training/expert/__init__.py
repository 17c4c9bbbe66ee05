"""Training experts: specs, the trainer, and selecting checkpoints."""
