"""The router: which worker holds which blocks, what load is booked, where a request goes.

What belongs here: pure logic that a test can call with numbers. What does not: sockets, processes and torch;
`services.router` is the process around it.
"""
