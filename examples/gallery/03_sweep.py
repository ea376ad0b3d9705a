"""A sweep: a step at every batch, on several chips, from a handful of traces.

sweep.png: Flat stretches cost nothing: there a larger batch takes no longer; dots name where
another limit takes over, and the band around a line holds 90 % of measured steps.
"""

import rooftrace as rt

chips = ["h200-sxm", "l4"]
swept = rt.sweep("gpt2", over={"batch": "1..1024"}, kv=512, phase="decode", chip=chips)
swept.plot("sweep.png")
