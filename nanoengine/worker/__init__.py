"""What runs a batch: inputs, forward pass, sampling, CUDA graphs, KV memory."""
