"""Measured time: benches, the suite of measurements, profiles of others, fits and validation."""
