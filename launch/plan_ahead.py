"""A plan that looks ahead: what this version trains, and where it trains nothing of the kind, what a later one will.

`shardwise plan` answers what-if questions, so a job that only a later version can train is planned all the same and
says so in its first lines; `shardwise train` plans without looking ahead and refuses it.
"""

from launch.plan_job import PlanInputs, plan_inputs
from trainer.spec.data_profile import DataProfile
from trainer.spec.errors import InputError, NothingFitsError
from trainer.spec.plan import Plan


def plan_ahead(inputs: PlanInputs, data: DataProfile) -> Plan:
    """The plan of this version, or the one that waits for the features it needs.

    The error of this version stands where a later one has no plan either.
    """
    try:
        return plan_inputs(inputs, data)
    except (InputError, NothingFitsError) as error:
        try:
            return plan_inputs(inputs, data, ignoring_version=True)
        except NothingFitsError as later:
            raise (error if isinstance(error, NothingFitsError) else later) from None
