"""Entry point of `python -m layerswap`."""

from layerswap.cli import main

if __name__ == "__main__":
    main()
