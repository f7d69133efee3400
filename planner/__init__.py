"""Will size the pools of prefill and decode workers to the traffic: performance model, forecast, sizing, actuators, simulator."""
