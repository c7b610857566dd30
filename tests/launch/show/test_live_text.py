"""What the view of a run looks like, letter by letter, and that no line of it ever wraps."""

import pytest

from shardwise.launch.show import view as live
from shardwise.trainer.spec.units import GIB, MIB

CURVE = tuple(live.Point(step, 9 * 0.98**step + 4.5) for step in range(1, 151))
ON_A_CARD = live.LiveView(
    title="tiny-20261122-173000",
    state="training",
    step=150,
    num_steps=300,
    attempt=2,
    seconds_left=70.0,
    curve=CURVE,
    loss=4.9513,
    eval_loss=5.1943,
    lr=3e-4,
    tokens_per_s=6630.0,
    predicted_tokens_per_s=5840.0,
    mfu=0.41,
    memory=live.MemoryGauge(61 * GIB, 80 * GIB, "card", 63 * GIB, 55 * GIB, 54 * GIB),
    card=live.CardFigures(0.98, 650.4, 71),
    num_skipped=2,
    incidents=("an older one", "out of memory at step 3 with zero2/bf16: predicted 70 GiB; the next fallback"),
)
ON_A_CPU = live.LiveView(
    title="tiny", state="training", step=1, num_steps=300, curve=CURVE[:1], loss=9.5, lr=3e-4, tokens_per_s=2920.0,
    predicted_tokens_per_s=5840.0, memory=live.MemoryGauge(483 * MIB, 24 * GIB, "RAM", None, 240 * MIB, 244 * MIB),
)  # fmt: skip

GOLDEN = {
    (40, "ascii"): """\
tiny-20261122-173000: training
progress   ###---  50%, 1 min 10 s left
loss       #=-.__  4.9513
speed      ######  6.63k tokens/s
memory     ####|-  61 of 80 GiB card
card       98% busy, 650 W, 71 C
incidents  1 restart, 2 steps skipped
""",
    (80, "unicode"): """\
tiny-20261122-173000: training, step 150 of 300, attempt 2
progress   ██████████░░░░░░░░░░  50%, 1 min 10 s left
loss       █▇▆▅▅▄▄▃▃▂▂▂▂▂▁▁▁▁▁▁  4.9513, held out 5.1943, learning rate 0.0003
speed      ████████████████████  6.63k tokens/s, 114% of the predicted 5.84k
memory     ███████████████│░░░░  61 of 80 GiB card, peak 55, predicted 54 GiB
card       98% busy, 650 W, 71 C
incidents  1 restart, 2 steps skipped, out of memory at step 3 with zero2/bf16..
""",
    (120, "ascii"): """\
tiny-20261122-173000: training, step 150 of 300, attempt 2
progress   ################----------------  50%, 1 min 10 s left
loss       #**++==~~~-----........_________  4.9513, held out 5.1943, learning rate 0.0003
speed      ################################  6.63k tokens/s, 114% of the predicted 5.84k, MFU 41.0%
memory     ########################-|------  61 of 80 GiB card, peak 55, predicted 54 GiB
card       98% busy, 650 W, 71 C
incidents  1 restart, 2 steps skipped, out of memory at step 3 with zero2/bf16: predicted 70 GiB; the next fallback
""",
}
GLYPHS = {"ascii": live.ASCII, "unicode": live.UNICODE}


@pytest.mark.parametrize(("width", "name"), GOLDEN)
def test_the_view_of_a_run_on_a_card(width, name):
    drawn = live.block_lines(ON_A_CARD, width=width, glyphs=GLYPHS[name])
    assert "\n".join(drawn) + "\n" == GOLDEN[width, name]
    assert name == "unicode" or all(line.isascii() for line in drawn)


def test_before_anything_is_known_there_is_a_state():
    assert live.block_lines(live.LiveView(title="tiny"), width=80, glyphs=live.ASCII) == [
        "tiny: starting",
        "incidents  none",
    ]
    waiting = live.LiveView(title="tiny", state="waiting: job 12 waits", num_steps=8)
    assert live.block_lines(waiting, width=80, glyphs=live.ASCII)[0] == "tiny: waiting: job 12 waits, step 0 of 8"
    view = ON_A_CPU._replace(memory=live.MemoryGauge(None, None, "RAM", None, 122 * MIB, 244 * MIB), loss=None)
    lines = live.block_lines(view, width=80, glyphs=live.ASCII)
    assert "memory     ##########----------  peak 122, predicted 244 MiB" in lines, "without a total"
    assert "loss       _                     no number, learning rate 0.0003" in lines


@pytest.mark.parametrize("glyphs", GLYPHS.values(), ids=GLYPHS)
def test_no_line_is_wider_than_the_terminal(glyphs):
    assert live.fitted(["one", "two", "three"], 8) == "one, two" and live.fitted(["one", "two"], 7) == "one"
    assert live.fitted(["a long word"], 7) == "a lon.." and live.fitted(["学習学習"], 5) == "学.."
    strange = ON_A_CARD._replace(title="学習 run", incidents=("a\x1b[2Kb\nc 学習" * 20,))
    for width in range(1, 130):
        for line in live.block_lines(strange, width=width, glyphs=glyphs):
            assert live.num_columns(line) <= width and line.isprintable(), width


@pytest.mark.parametrize(
    ("share", "mark", "drawn"),
    [
        (0, None, "----------"),
        (0.5, None, "#####-----"),
        (0.999, None, "#########-"),
        (1, None, "##########"),
        (1.7, None, "##########"),
        (-1, None, "----------"),
        (0.5, 0.7, "#####--|--"),
        (0.5, 3.0, "#####----|"),
    ],
)
def test_a_bar_is_full_when_it_is_complete(share, mark, drawn):
    assert live.bar(share, width=10, glyphs=live.ASCII, mark=mark) == drawn


def test_a_log_gets_one_line_of_ascii():
    assert live.log_line(ON_A_CARD) == (
        "[############------------] 150/300  loss 4.9513  lr 0.0003  6.63k tokens/s (114% of predicted)  "
        "61 of 80 GiB  1 min 10 s left  1 restart  2 steps skipped"
    )
    assert live.log_line(ON_A_CPU) == (
        "[------------------------] 1/300  loss 9.5000  lr 0.0003  2.92k tokens/s (50% of predicted)  240 MiB"
    )
    assert live.log_line(live.LiveView(title="lost its plan", step=3)) == "step 3"
