"""Load generation and benchmarks: throughput, TTFT, TPOT and ITL.

What measures a cluster talks HTTP to it, as any client would. `cpu_engine` is the exception: it drives the engine in
its own process, to compare it with other engines.
"""

import os

# Threads that wait sleep instead of spinning: beside any other busy process a spinning one takes the core that the
# thread it waits for needs, which makes two threads several times slower than one. Must be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
