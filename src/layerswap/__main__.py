"""`python -m layerswap` is the `layerswap` command."""

from layerswap.cli import main

main()
