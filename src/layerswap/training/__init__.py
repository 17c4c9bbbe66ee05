"""Experts: data mixes, SFT, LoRA, partitions, alternating SFT, selection."""
