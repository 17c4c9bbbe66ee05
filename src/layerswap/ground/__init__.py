"""What every room stands on: errors, strict JSON and YAML, strict models, atomic outputs."""
