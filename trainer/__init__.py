"""Decides and trains: `spec` holds values, `planning` decisions without torch, `runtime` what happens on devices."""
