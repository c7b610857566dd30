"""The model card of an export: its base, data and settings, and the predicted and the measured figures.

The front matter is what the hub reads (https://huggingface.co/docs/hub/model-cards): base model, library, tags, and a
licence only where the base's own card names one. Data and base models are called by their names; folders of the
machine, tokens and environment never get into it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.trainer.runtime.models.outer import is_part, outer_of
from shardwise.trainer.runtime.run.state import installed_versions
from shardwise.trainer.spec.model.stored import Treatment, weight_format
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation, Report
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

_SNAPSHOTS = "snapshots"  # the folder of the hub's cache that holds one folder for each revision
_FENCE = "---"


class Base(NamedTuple):
    """The model that was started from: its name, on the hub or of its folder; `name` is None for a new model."""

    name: str | None
    revision: str | None = None
    folder: Path | None = None  # where it is a folder of this machine rather than of the hub
    licence: str | None = None


class Export(NamedTuple):
    """Facts for the card of an exported folder."""

    plan: Plan
    kind: str | None = None  # model | adapters | merged | onnx | gguf; None: as the method trains
    dtype: str | None = None
    step: int | None = None
    evaluation: Evaluation | None = None  # of that step
    report: Report | None = None
    checks: tuple[str, ...] = ()  # one sentence for each comparison, with the difference
    adapters: tuple[str, ...] = ()  # names of their parameters

    @property
    def kind_text(self) -> str:
        freezes = self.plan.chosen.method.freezes_base
        return self.kind or ("adapters" if freezes else "model")


def base_of(plan: Plan) -> Base:
    """The base of a plan's model."""
    if plan.model_path is None:
        return Base(name=plan.job.model.name)
    path = Path(plan.model_path)
    licence = _licence(path / "README.md")
    if path.parent.name == _SNAPSHOTS:
        return Base(plan.job.model.name, revision=plan.job.model.revision or path.name, licence=licence)
    return Base(path.name, revision=plan.job.model.revision, folder=path, licence=licence)


def model_card(export: Export) -> str:
    """README.md: front matter in YAML, then Markdown."""
    plan, base = export.plan, base_of(export.plan)
    front = yaml.safe_dump(_front_matter(export, base), sort_keys=False, allow_unicode=True)
    sections = [
        f"# {plan.name}",
        _opening(export, base),
        _loading(export, base),
        "## Training\n\n" + _table(_training_rows(export, base)),
        *_results(export),
        *(["## Checks\n\n" + "\n".join(f"- {check}" for check in export.checks)] if export.checks else []),
    ]
    return f"{_FENCE}\n{front}{_FENCE}\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(export: Export, base: Base) -> dict[str, Any]:
    kind, method = export.kind_text, export.plan.chosen.method
    front: dict[str, Any] = {}
    if base.name is not None and base.folder is None:
        front["base_model"] = base.name
        front["base_model_relation"] = "adapter" if kind == "adapters" else "finetune"
    if base.licence is not None:
        front["license"] = base.licence
    front["library_name"] = "peft" if kind == "adapters" else "transformers"
    front["pipeline_tag"] = "text-generation"
    front["tags"] = ["shardwise", str(method), *([kind] if kind in ("onnx", "gguf") else [])]
    return front


def _opening(export: Export, base: Base) -> str:
    shape = export.plan.model_shape
    opening = {
        "model": "All weights of",
        "adapters": "Adapters for",
        "merged": "The weights, with trained adapters merged into them, of",
        "onnx": "An ONNX graph of",
        "gguf": "A GGUF file of",
    }[export.kind_text]
    whose = f"`{base.name}`" if base.name is not None else f"a new {shape.model_type} model"
    held = f", in {export.dtype}" if export.dtype is not None else ""
    at = f", exported at step {export.step}" if export.step is not None else ""
    return f"{opening} {whose}{held}{at}. Trained with shardwise {installed_versions().get('shardwise', '')}."


def _loading(export: Export, base: Base) -> str:
    kind, plan = export.kind_text, export.plan
    if kind == "onnx":
        code = (
            "import onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            'logits = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})[0]'
        )
        shapes = "Both inputs are int64 [batch, sequence]; logits are [batch, sequence, vocabulary]."
        return f"## Use\n\n{shapes}\n\n```python\n{code}\n```"
    if kind == "gguf":
        run = f"ollama create {plan.name.lower()} -f Modelfile\nollama run {plan.name.lower()}"
        where = "In this folder with Ollama; the .gguf file is for every program on llama.cpp:"
        return f"## Use\n\n{where}\n\n```sh\n{run}\n```"
    names = ["AutoModelForCausalLM", *(["AutoTokenizer"] if plan.tokenizer_path is not None else [])]
    imports, lines = list[str](), [""]
    trust = ", trust_remote_code=True" if plan.model_code is not None else ""
    if kind == "adapters":
        settings = f', revision="{base.revision}"' if base.revision is not None and base.folder is None else ""
        outer, decoder = outer_of(plan, export.adapters), _decoder_class(plan)
        if outer is None and is_part(plan):
            return (
                f"## Use\n\nThe adapters have the names of the text model in `{base.name}`; `shardwise export RUN OUT "
                "--merge` writes that model whole, with them in it."
            )
        names[0] = names[0] if outer is None else outer.model_class.__name__
        if decoder is not None:
            names.append(decoder)
            settings += f", quantization_config={decoder}(dequantize=True)"
        elif plan.chosen.method is Method.QLORA and plan.model_shape.quant is None:
            names.append("BitsAndBytesConfig")
            quantisation = 'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True'
            lines.append(f"in_4_bit = BitsAndBytesConfig({quantisation})")
            settings += ", quantization_config=in_4_bit"
        imports.append("from peft import PeftModel")
        lines += [
            f'base = {names[0]}.from_pretrained("{base.name or "BASE"}"{settings}{trust})',
            'model = PeftModel.from_pretrained(base, "THIS_FOLDER")',
        ]
    else:
        lines.append(f'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER"{trust})')
    if plan.tokenizer_path is not None:
        lines.append('tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")')
    imports.append(f"from transformers import {', '.join(names)}")
    return "## Use\n\n```python\n" + "\n".join([*imports, *lines]) + "\n```"


def _decoder_class(plan: Plan) -> str | None:
    """transformers' settings with which it decodes the base; None if that is not stored in FP8 or MXFP4."""
    path = None if plan.model_path is None else Path(plan.model_path, "config.json")
    weights = weight_format(json.loads(path.read_bytes())) if path is not None and path.is_file() else None
    if weights is None or weights.treatment is not Treatment.DECODED:
        return None
    return "Mxfp4Config" if weights.name == "mxfp4" else "FineGrainedFP8Config"


def _training_rows(export: Export, base: Base) -> list[tuple[str, str]]:
    plan = export.plan
    job, chosen, schedule, rows = plan.job, plan.chosen, plan.schedule, plan.data
    lora = job.train.lora
    method = str(chosen.method)
    if chosen.method.freezes_base:
        kind = " with DoRA" if lora.dora else ""
        method += f"{kind}, rank {lora.rank}, alpha {lora.alpha:g}, {'rank-stabilised, ' if lora.rslora else ''}on "
        method += ", ".join(lora.targets)
    revision = f", revision {base.revision}" if base.revision is not None else ""
    examples = f"{format_count(rows.num_rows)} rows, {format_count(rows.num_tokens)} tokens"
    held_out = f"; {rows.num_eval_rows} rows held out" if rows.num_eval_rows else ""
    return [
        ("base", f"{base.name}{revision}" if base.name is not None else "none: new weights"),
        ("method", method),
        ("data", f"{_sources(plan)}: {examples}{held_out}"),
        (
            "schedule",
            f"{schedule.num_steps} steps of {schedule.tokens_per_step} tokens, sequences of {chosen.seq_len}, "
            f"learning rate {schedule.lr:g}, {job.train.schedule} after {schedule.warmup_steps} steps of warmup, "
            f"weight decay {job.train.weight_decay:g}, clipping at {job.train.clip:g}, seed {job.train.seed}",
        ),
        ("strategy", f"{chosen.strategy.name} on {_devices(plan)}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in installed_versions().items())),
    ]


def _results(export: Export) -> list[str]:
    found = []
    if export.evaluation is not None:
        score = export.evaluation
        found.append(
            f"## Evaluation\n\nHeld-out loss {score.loss:.4f} (perplexity {score.perplexity:.2f}) over "
            f"{score.num_tokens} tokens at step {score.step}."
        )
    if export.report is not None:
        predicted, measured = export.report.predicted, export.report.measured
        rows: tuple[tuple[str, Callable[[Any], str], float | None, float | None], ...] = (
            ("peak memory of a device", format_bytes, predicted.memory.peak_allocated_bytes,
             measured.memory.peak_allocated_bytes),
            ("time of a step", format_seconds, predicted.speed.step_s, measured.speed.step_s),
            ("tokens a second and device", format_count, predicted.speed.tokens_per_s_per_gpu,
             measured.speed.tokens_per_s_per_gpu),
        )  # fmt: skip
        lines = ["| | predicted | measured |", "|---|---|---|"]
        for name, shown, *figures in rows:
            cells = ("unknown" if figure is None else shown(figure) for figure in figures)
            lines.append(f"| {name} | {' | '.join(cells)} |")
        found.append("## Predicted and measured\n\n" + "\n".join(lines))
    return found


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows)]
    )


def _sources(plan: Plan) -> str:
    """Names of the data's sources: hub ids as they are, of files and folders the last part."""
    names = [
        f"{_source_name(each.source)}{f' (weight {each.weight:g})' if each.weight != 1 else ''}"
        for each in plan.job.data.train
    ]
    return ", ".join(names) or "unnamed"


def _source_name(source: str) -> str:
    is_hub_id = source.count("/") == 1 and not source.startswith((".", "/", "~")) and not Path(source).suffix
    return source if is_hub_id and not Path(source).exists() else Path(source).name


def _devices(plan: Plan) -> str:
    count, cards = plan.chosen.num_ranks, plan.hardware.gpus
    name = (cards[0].name if cards else None) or plan.hardware.host.cpu_name or "CPU"
    return f"{count} x {name}"


def _licence(card: Path) -> str | None:
    """Licence named by the card of the base model, or None."""
    if not card.is_file():
        return None
    opening, *rest = card.read_text(encoding="utf-8", errors="replace").split(_FENCE, 2)
    if opening.strip() or not rest:
        return None
    try:
        front = yaml.safe_load(rest[0])
    except yaml.YAMLError:
        return None
    found = front.get("license") if isinstance(front, dict) else None
    return found if isinstance(found, str) else None
