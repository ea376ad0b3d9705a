"""Sensitivity: what moves a step most.

tornado.png: The longer a bar, the more the step answers to that number; a number without a bar
does not move it at all.
"""

import rooftrace as rt

rt.sensitivity("gpt2", batch=8, kv=512, phase="decode", chip="l4", plot="tornado.png")
