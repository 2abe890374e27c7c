"""Discrete-event simulation of a cluster: real policy, modelled devices, recorded workloads."""
