"""An import holds a few tensors, never the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from export_factory import write_base
from import_factory import distributed, saved_by_torch, zero
from safetensors.torch import load_file

CONFIG = {
    "model_type": "llama", "vocab_size": 8000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False,
}  # fmt: skip
WATCH = """
import json, sys, threading
from pathlib import Path
from shardwise.trainer.runtime.importing.run import import_checkpoint
from shardwise.trainer.runtime.loop.memory_profile import anonymous_bytes
from shardwise.trainer.spec.messages.worker_requests import ImportRequest, WeightType

def peak(folder, dtype):
    before, peaks, is_done = anonymous_bytes(), [], threading.Event()

    def watch():
        while not is_done.wait(0.001):
            peaks.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    import_checkpoint(ImportRequest(checkpoint=folder, out=f"{folder}-{dtype}", dtype=dtype))
    is_done.set()
    watcher.join()
    return max(peaks) - before

small, pickled, zero, dcp = sys.argv[1:]
peak(small, None)
print(json.dumps([peak(pickled, None), peak(zero, WeightType.BF16), peak(dcp, WeightType.BF16)]))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads what Linux tells of a process")
def test_no_more_than_four_of_the_largest_tensors_are_in_memory(tmp_path):
    small = saved_by_torch(write_base(tmp_path / "small-base"), tmp_path / "small")
    base = write_base(tmp_path / "base", CONFIG)
    sizes = [each.numel() * 4 for each in load_file(base / "model.safetensors").values()]
    folders = [
        saved_by_torch(base, tmp_path / "bin"),
        zero(base, tmp_path / "zero"),
        distributed(base, tmp_path / "dcp"),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WATCH, str(small), *map(str, folders)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert max(sizes) < max(peaks) < 4 * max(sizes), peaks  # ZeRO and DCP put each tensor together
    assert sum(sizes) > 8 * max(sizes), "the bound is far from the model"
