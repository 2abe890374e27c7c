"""One model on one device group: weights, tokenizer, paged KV, kernels, runner, sampler, step loop."""
