#!/usr/bin/env python3
"""What of redis-cli the stand-in for the Redis image needs: one command without arguments, with $REDISCLI_AUTH."""

import os
import socket
import sys

with socket.create_connection(("127.0.0.1", 6379), timeout=3) as server:
    server.sendall(f"AUTH {os.environ['REDISCLI_AUTH']}\r\n{sys.argv[1]}\r\n".encode())
    replies = server.makefile()
    replies.readline()  # to AUTH
    reply = replies.readline()
print(reply.strip())
sys.exit(not reply.startswith("+"))
