"""The planner: sizes the pools of prefill and decode workers to the traffic. Empty for now.

What belongs here: a performance model, a forecast, the sizing, actuators and a simulator. What does not: placing single
requests, which is the router's.
"""
