"""Unmodified programs: launched in a separate process, on a fake CUDA device, step by step."""
