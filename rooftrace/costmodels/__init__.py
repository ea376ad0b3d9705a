"""The cost of an operator graph in FLOPs, bytes and seconds.  Never imports torch."""
