"""The page of a report, in a browser.

report.html: The verdict stands first; click a box of the tree to look into that module, and point
at a mark of the roofline to see its formula.
"""

import rooftrace as rt

report = rt.report("gpt2", batch=8, seq=255, kv=255, dtype="bf16", chip=["h200-sxm", "l4"])
report.write(".", ("html",))
