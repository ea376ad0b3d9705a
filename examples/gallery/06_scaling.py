"""Many chips: how a training step scales.

scaling.png: Left, 100 % means that each chip does as much per second as one alone, which is hollow
where one alone would not hold the step; right, the weak line stays flat and the strong line halves
with every doubling, as long as exchanges stay hidden.
"""

import rooftrace as rt

chips = [1, 4, 16, 64, 256]
answer = rt.tools.scaling("llama-3.1-8b", system="dgx-h100", seq=4096, chips=chips)
answer.plot("scaling.png")
