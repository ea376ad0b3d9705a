"""Several models on one roofline, over the batch.

decode.png: A line joins the steps of one model from a batch of 1 to one of 256: it climbs along the
roof as more tokens share each weight, and ends where each token's own cache is most of the bytes.
"""

import rooftrace as rt

models = ["gpt2", "llama-3.1-8b"]
batches = [1, 4, 16, 64, 256]
result = rt.roofline(models, phases=["decode"], batch=batches, kv=512, dtype="bf16", chip="l4")
result.plot("decode.png")
