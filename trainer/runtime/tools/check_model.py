"""A worker that builds a model, and compares its folder and a job's targets with it; it reads no tensor."""

import torch
from transformers.initialization import no_init_weights

from shardwise.trainer.runtime.models.build import stored_model
from shardwise.trainer.runtime.models.configs import config_of, faults_of_config, refuse_padding
from shardwise.trainer.runtime.models.meta_model import causal_model
from shardwise.trainer.runtime.models.methods import adapter_config
from shardwise.trainer.runtime.models.model_code import load_model_code
from shardwise.trainer.runtime.run.process import run_request_and_exit
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.messages.worker_requests import CheckModelRequest, Lines


def check_model(request: CheckModelRequest) -> Lines:
    """Nothing; InputError for what a rank would refuse."""
    load_model_code(request.model_code)
    with faults_of_config(request.model_config, origin=request.origin):
        if request.model_path is not None:
            model = stored_model(request.model_path, request.model_config, method=request.method).check()
        else:
            with torch.device("meta"), no_init_weights():
                model = causal_model(config_of(request.model_config), attn_implementation="eager")
    refuse_padding(model, origin=request.origin)
    if request.targets:
        adapter_config(model, LoraJob(targets=request.targets))
    return Lines()


if __name__ == "__main__":
    run_request_and_exit(CheckModelRequest, check_model)
