"""The cheapest deployment that keeps a promise.

front.png: A line is a deployment from a batch of 1, on the right, to the largest that fits; right
of the dashed line it keeps the promise, and the circle is the cheapest step that does.
"""

import rooftrace as rt

chips = ["l4", "a100-sxm-80", "h100-sxm", "b200-sxm"]
limits = {"tpot": "50 ms", "ttft": "1 s"}
answer = rt.solve("llama-3.1-8b", find="cheapest", mix="1024:256", chip=chips, chips=1, **limits)
answer.plot("front.png")
