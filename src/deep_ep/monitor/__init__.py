"""`deep-ep monitor`: the ranks of this host that serve metrics (`deep_ep.metrics`), live and for Prometheus."""
