"""How many nodes of a partition are worth it: `shardwise plan` plans the job for each number of them."""

from msgspec.structs import replace

from launch.plan.gather import PlanInputs, plan_inputs
from slurm.quantities import describe_num_jobs, format_duration, parse_duration
from trainer.planning import node_counts
from trainer.planning.node_counts import NodeCount, counts_to_try, planned
from trainer.planning.page.content import Section
from trainer.spec.errors import InputError, NothingFitsError
from trainer.spec.plan import Plan


def node_counts_section(inputs: PlanInputs, plan: Plan) -> Section | None:
    """The numbers of nodes side by side, and jobs at the time limit; None where the machine is no partition's nodes."""
    found = inputs.partition
    if found is None:
        return None
    asked, place = plan.hardware.num_nodes, found.partition.name
    counts = [
        planned(count, plan) if count == asked else _plan_for(count, inputs, plan)
        for count in counts_to_try(found.num_allowed_nodes, asked)
    ]
    (own,) = (count for count in counts if count.num_nodes == asked)
    hours = own.totals.hours if own.totals is not None else 0.0
    wanted = parse_duration(plan.job.slurm.time)
    limit, words = found.time_limit_s, []
    if wanted is not None and limit is not None and wanted > limit:
        words = [f"slurm.time {plan.job.slurm.time} is more than {place} allows, {format_duration(limit)}"]
    elif wanted is not None:
        limit = wanted
    nodes = f"{asked} node{'s' if asked > 1 else ''}"
    words.append(f"on {nodes}: {describe_num_jobs(hours, limit, place=place)}")
    return node_counts.node_counts_section(counts, place=place, allowed=found.num_allowed_nodes, sentences=words)


def _plan_for(num_nodes: int, inputs: PlanInputs, plan: Plan) -> NodeCount:
    hardware = replace(inputs.hardware, num_nodes=num_nodes)
    try:
        return planned(num_nodes, plan_inputs(inputs._replace(hardware=hardware), plan.data))
    except (NothingFitsError, InputError) as error:
        return NodeCount(num_nodes=num_nodes, reason=str(error).splitlines()[0])
