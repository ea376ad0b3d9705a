"""Theory: what an operator graph costs in FLOP, bytes and seconds.  Never imports torch."""
