"""The papers' benchmarks as lm-eval tasks over local files: the protocol in one word."""
