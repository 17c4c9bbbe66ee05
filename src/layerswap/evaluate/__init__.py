"""Proving a composition: how well it does, and whether a difference is more than noise."""
