"""What every test needs before torch is imported."""

import os

# As many workers as processors run beside each other: threads of their own would only get in the
# way, and make the tests several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
