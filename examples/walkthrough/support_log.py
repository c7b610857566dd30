"""The `extensions` of 6-extensions.yaml: converts a row of this log to a chat, and prints a line every second step.

The functions format_row, build_model, loss and on_step are called if they are defined.
"""


def format_row(row):
    """Converts a row to a known format; None skips it."""
    if row["rating"] < 3:
        return None
    return {
        "messages": [
            {"role": "user", "content": row["asked"]},
            {"role": "assistant", "content": row["answered"]},
        ]
    }


def on_step(step, metrics):
    """Called after every step on rank 0; `metrics` has the values of metrics.jsonl."""
    if step % 2 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}", flush=True)
