"""One experiment: models on documents give answers; answers are chosen by, compared, reported."""
