"""Decisions without effects: clock and views come in, plain data goes out; for live clusters and the simulator."""
