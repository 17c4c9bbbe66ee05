"""From a merged folder to a GGUF file that provably answers as it does."""
