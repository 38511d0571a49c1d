"""A need in, ranked cards out.

What libraries read from the environment when they are loaded is said here, before any module of the package loads one.
"""

import os

# One request is compared with all cards in a tenth of a millisecond; with two threads each waits for the other, for
# milliseconds wherever the machine has other work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Whoever owns the machine decides what leaves it, and that is nothing: onnxruntime would report to its makers.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
