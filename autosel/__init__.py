"""autosel: pick the fastest correct way to run a quantised mixture-of-experts layer here."""

__version__ = "0.1.0"
