"""One model on several devices of a host: each rank holds a share of the heads, of the MLPs and of the vocabulary."""
