"""The programme of `benchmarks/gpu.py`: five questions to one card, asked by real runs of a few steps.

programme    the steps in their order, the log that a later call resumes from, several steps side by side
case, models, bench    a configuration, its model with random weights, its plan and its run
engines, predicted, peers, fp8, small_cards    the five parts
tables, peaks    what is printed and kept
"""
