"""The benchmark: throughput against what the machine physically can."""

import time

# Before the imports of its modules, which take seconds; they are part of what is measured.
IMPORT_STARTED = time.perf_counter()
