"""The programme of `benchmarks/gpu.py`: five parts of real runs of a few steps on one card.

programme    the ordered steps, the log that a later call resumes from, concurrent steps
case, models, bench    a configuration, its model with random weights, its plan and its run
engines, predicted, peers, fp8, small_cards    the five parts
tables, peaks    printed tables and stored measurements
"""
