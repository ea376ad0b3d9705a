"""What an operator graph costs in FLOPs, bytes and seconds.  Never imports torch."""
