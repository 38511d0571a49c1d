"""A need in, ranked cards out.

The environment variables that libraries read at import are set here, before any module of the package imports one.
"""

import os

# One request is compared with all cards in a tenth of a millisecond; with two threads each waits for the other, for
# milliseconds wherever the machine has other work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Only the owner decides what leaves the machine, so onnxruntime must not send telemetry.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
