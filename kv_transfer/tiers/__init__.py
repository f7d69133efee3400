"""Where blocks of KV lie that left a worker's cache: stores below it, and the policies by which they keep and drop.

What belongs here: getting and putting blocks by their hash, verified, what is worth its place, and the books of what is
where and what is still to be copied. What does not: moving blocks between processes, which is the business of
`services` with `kv_transfer` around it.
"""
