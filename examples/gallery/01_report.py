"""A report's figures: where each step stands, and what its time, bytes and memory consist of.

roofline.png: A point below the slanted roof is limited by HBM and one below the flat roof by
computing; the dotted line up to the roof is what the step loses on its way.

time.png: Each bar is the expected time of a step by families of ops, and the bar below it says
what limits that time.

bytes.png: Each bar is what a step moves through HBM, by whose bytes they are; naive beside
efficient shows what fusing saves.

memory.png: Each bar is what is alive at the peak of a step, by role; the words beside it say
whether the chip holds that.

memory-training.png: What is alive as one op after the other runs: activations pile up in the
forward pass and go in the backward pass, and the mark is the peak.

roofline-decode.png: A point for each family of ops of one step: the largest points take most of
its time, so they are worth looking at first.
"""

import rooftrace as rt

report = rt.report("gpt2", batch=8, seq=255, kv=255, dtype="bf16", chip="h200-sxm")
report.write(".", ("png",))
