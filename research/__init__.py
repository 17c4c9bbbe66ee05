"""The evidence behind the docs: what was asked of the lab, and the figures."""
