"""Measures the changes of fine-tuning: maps of changed rows."""
