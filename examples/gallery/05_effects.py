"""Effects over a grid: which of several choices matters, on average over all others.

effects.png: Each bar reaches from the fastest to the slowest level of a factor, averaged over all
levels of the others, and the number on the right is its share of all variance.
"""

import rooftrace as rt

grid = {"batch": [1, 64], "kv": [128, 900], "dtype": ["fp32", "bf16"], "chip": ["l4", "h200-sxm"]}
rt.sensitivity("gpt2", phase="decode", grid=grid, log=True, plot="effects.png")
