"""Studies that ship with the package."""
