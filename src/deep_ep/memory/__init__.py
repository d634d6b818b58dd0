"""Memory that every rank of a host can reach, and the few integers that ranks exchange to set it up."""
