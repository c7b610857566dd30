"""What `extensions` of 6-extensions.yaml names: how a row of this log becomes a chat, and a line every second step.

A function is called where its name is one of format_row, build_model, loss, on_step; each may be left out.
"""


def format_row(row):
    """A row as it was read, to a row of a known shape; None leaves it out."""
    if row["rating"] < 3:
        return None
    return {
        "messages": [
            {"role": "user", "content": row["asked"]},
            {"role": "assistant", "content": row["answered"]},
        ]
    }


def on_step(step, metrics):
    """After every step, on the first rank; `metrics` is what metrics.jsonl gets."""
    if step % 2 == 0:
        print(f"step {step}: loss {metrics['loss']:.3f}", flush=True)
