"""What fine-tuning changed."""
