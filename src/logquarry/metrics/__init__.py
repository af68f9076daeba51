"""Metrics of a store for Prometheus; needs the extra ``metrics``."""
