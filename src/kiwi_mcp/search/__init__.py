"""A need in, ranked cards out."""

import os

# Read by numpy's own library when it is loaded. One request is compared with all cards in a tenth of a millisecond;
# with two threads each waits for the other, for milliseconds wherever the machine has other work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
