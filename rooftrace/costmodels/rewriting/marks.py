"""Facts of ops that say which kernels of a library run, or why none does."""

WRITTEN_OUT = "written_out"
"""Of an attention that calls no library's kernel, so that its tiles are not known."""
UNFUSED = "unfused_attention"
"""Of the softmax of an attention for which CUDA has no single kernel: why that is."""
LIBRARY = "library"
"""Of an attention that another kernel than flash attention runs: EFFICIENT."""
EFFICIENT = "memory-efficient"
BESIDE = "beside"
"""Of a kernel that an op launches beside its own: the name of that op."""
MASK_FACTS = ("visible_pairs", "mask", "window", "visible_keys")
"""What is known of a mask: pairs of one head that it shows (mean of the batch and the heads), its
kind, the most keys that one query sees, and the keys that some query sees.  Of attention, or of the
op that puts the mask on."""
BY_LENGTHS = "by_lengths"
"""Of an attention whose kernel is told lengths of sequences in place of its mask."""
