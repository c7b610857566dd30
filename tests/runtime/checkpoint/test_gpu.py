"""The same claims with weights and moments on a GPU, where torch keeps the step count on the device as well."""

import pytest
import torch

from shardwise.trainer.runtime.checkpoint import import_state, import_weights
from shardwise.trainer.spec.engines import Sharding

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_state_on_a_gpu_comes_back_bitwise(tiny, newest, tmp_path, kind, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    model = tiny.build_model().to("cuda", dtype)
    optimizer = tiny.build_optimizer(model, kind)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    tiny.save(tmp_path, model, optimizer, 1)
    fresh = tiny.build_model(seed=9).to(dtype)
    import_weights(fresh, newest(tmp_path))
    fresh_optimizer = tiny.build_optimizer(fresh.to("cuda"), kind)
    import_state(fresh, fresh_optimizer, newest(tmp_path), sharding=Sharding.NONE)
    assert tiny.digest(fresh, fresh_optimizer) == tiny.digest(model, optimizer)
    for parameter, copy in zip(model.parameters(), fresh.parameters(), strict=True):
        made, ours = (
            {key: (value.dtype, value.device) for key, value in state.items()}
            for state in (optimizer.state[parameter], fresh_optimizer.state[copy])
        )
        assert made == ours
        copy.grad = parameter.grad.clone()
    optimizer.step()
    fresh_optimizer.step()
    assert tiny.digest(fresh, fresh_optimizer) == tiny.digest(model, optimizer)
