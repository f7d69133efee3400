"""Load generation and benchmarks: throughput, TTFT, TPOT and ITL.

What measures a cluster talks HTTP to it, as any client would. `cpu_engine` is the exception: it drives the engine in
its own process, to compare it with other engines.
"""
