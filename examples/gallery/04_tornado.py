"""Sensitivity: what moves a step most.

tornado.png: The longer a bar, the more the step answers to half and twice of that number; one
without a bar hardly moves it.
"""

import rooftrace as rt

rt.sensitivity("gpt2", batch=8, kv=512, phase="decode", chip="l4", plot="tornado.png")
