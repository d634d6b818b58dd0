"""Verified, timed exchanges: what `deep-ep bench`, `check` and `tune` and the verification programs are made of."""
