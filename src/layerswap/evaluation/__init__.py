"""Evaluating models: lm-eval tasks, the papers' suites, statistics."""
