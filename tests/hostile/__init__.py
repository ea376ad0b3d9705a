"""Patterns of real PyTorch code that are hard to capture; `test_hostile` says how to add some."""
