"""Unmodified programs: launched in a process of their own, on a fake CUDA device, step by step."""
