"""Models: building, attention, adapters, quantisation."""
