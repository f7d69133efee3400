"""Routing as pure logic: which worker holds which blocks, what load is booked, where a request goes. No sockets, no torch."""
