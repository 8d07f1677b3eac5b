"""Faults under load, and a checker that knows each request's right tokens: `make chaos`."""
