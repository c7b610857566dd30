"""Names, groups and summaries of what trackers are sent."""

from run_factory import run_plan

from shardwise.launch.track.tracker import Summaries, measured_series, predicted_series, series_name, summary_of
from shardwise.trainer.spec.hardware import DeviceKind


def test_numbers_are_sent_and_a_prediction_has_the_name_of_its_measured_series():
    from shardwise.trainer.runtime.loop.metrics import StepMetrics  # loads torch

    row = {"step": 3, "loss": None, "lr": 0.1, "skipped": True, "skipped_rows": [1], "gpu_throttle": "heat", "new": 7}
    assert measured_series(row) == {"step": 3, "train/lr": 0.1, "train/skipped": 1, "other/new": 7}
    chosen = run_plan().chosen
    series = predicted_series(chosen, DeviceKind.CUDA)
    assert series["memory/memory_peak_bytes_predicted"] == chosen.memory.peak_allocated_bytes
    assert series["memory/memory_allocated_bytes_predicted"] == chosen.memory.steady_allocated_bytes
    assert series["speed/tokens_per_s_predicted"] == chosen.speed.tokens_per_s_per_gpu * chosen.num_ranks
    assert series["time/step_s_predicted"] == chosen.speed.step_s
    on_cpu = predicted_series(chosen, DeviceKind.CPU)
    assert on_cpu["memory/host_rss_bytes_predicted"] == chosen.memory.need_bytes
    assert not {"memory/memory_reserved_bytes_predicted", "memory/memory_device_bytes_predicted"} & on_cpu.keys()
    measured = {series_name(field) for field in StepMetrics.__struct_fields__}
    assert {name.removesuffix("_predicted") for name in (*series, *on_cpu)} <= measured


def test_summaries_are_those_of_all_lines():
    assert summary_of("eval/eval_accuracy") == ("max", "last") and summary_of("eval/eval_loss") == ("min", "last")
    assert summary_of("memory/memory_peak_bytes_predicted") == ("last",)
    summaries = Summaries()
    for loss, speed, peak in ((3.0, 10, 5), (1.0, 20, 9), (2.0, 60, 7)):
        summaries.add({"step": 1, "train/loss": loss, "speed/mfu": speed, "memory/x": peak, "train/lr": loss})
    assert summaries.all() == {
        "train/loss": {"min": 1.0, "last": 2.0},
        "speed/mfu": {"mean": 30.0, "last": 60},
        "memory/x": {"max": 9},
        "train/lr": 2.0,
    }
