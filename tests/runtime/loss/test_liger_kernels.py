"""Liger's Triton kernels, interpreted on a CPU, compared with the eager loss head.

The kernels come from the package index into a folder of the test: the locked environment has neither Triton nor Liger,
and a plan is another where they are installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # a gigabyte of Triton
LIMIT_S = 600
PROGRAM = """
import json, sys
import torch
import liger_kernel.transformers
from transformers import LlamaConfig, LlamaForCausalLM
from shardwise.trainer.runtime.loss import install_loss_head
from shardwise.trainer.spec.strategy import LossHead

torch.cuda.is_available = lambda: True  # Liger is refused without a GPU; the interpreter needs none
ids = torch.arange(48).view(2, 24) * 7 % 32

def trained(head):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager")
    model = LlamaForCausalLM(config)
    install_loss_head(model, head, chunk_tokens=None)
    loss = model(input_ids=ids, labels=ids)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters()}

(liger, of_liger), (eager, of_eager) = trained(LossHead.FUSED_LINEAR), trained(LossHead.EAGER)
torch.testing.assert_close(liger, eager)
for name, gradient in of_eager.items():
    torch.testing.assert_close(of_liger[name], gradient, msg=lambda text: f"{name}: {text}")
print(json.dumps([float(eager), "liger_kernel.ops.fused_linear_cross_entropy" in sys.modules]))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = str(tmp_path_factory.mktemp("kernels"))
    argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, "triton", "liger-kernel"]
    subprocess.run(argv, check=True, timeout=LIMIT_S)
    return Path(folder)


def test_ligers_loss_and_gradients_are_those_of_the_eager_head(kernels):
    """Without a soft cap, whose tanh Triton's interpreter cannot run (3.8: `'float' object has no attribute 'to'`)."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(kernels), "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loss, ran_liger = json.loads(done.stdout)
    assert loss > 0 and ran_liger
