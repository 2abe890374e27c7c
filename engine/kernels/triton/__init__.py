"""GPU kernels in Triton, one file per kernel: each has a wrapper with the signature of its `reference` function."""
