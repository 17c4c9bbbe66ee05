"""`layerswap new`: from a person's files to a study that trains, composes and evaluates."""
