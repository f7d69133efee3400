"""The planner: how many prefill and decode workers a load needs. So far a simulator that says what a cluster does.

What belongs here: a performance model, a forecast, the sizing, actuators and the simulator. What does not: placing
single requests, which is the router's.
"""
