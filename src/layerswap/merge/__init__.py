"""Merges: plans over opened checkpoints, a streaming writer, and verification."""
